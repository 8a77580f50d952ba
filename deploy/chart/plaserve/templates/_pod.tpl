{{/* What pods of all roles have in common. Context: (root, role, values, shard or ""). */}}

{{- define "plaserve.podMeta" -}}
labels:
  {{- include "plaserve.selector" . | nindent 2 }}
annotations:
  checksum/settings: {{ include "plaserve.settings" . | sha256sum }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* No Kubernetes API and no Service variables: PLASERVE_PORT of a Service named plaserve would be a bad setting. */}}
{{- define "plaserve.podSafety" -}}
serviceAccountName: {{ include "plaserve.name" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.security.user }}
  runAsGroup: {{ int64 .Values.security.group }}
  fsGroup: {{ int64 .Values.security.group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "plaserve.containerSafety" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "plaserve.podCommon" -}}
{{ include "plaserve.podSafety" .root }}
# The process is not the first one: that one ignores SIGTERM until it has a handler, so a worker that loads would.
shareProcessNamespace: true
terminationGracePeriodSeconds: {{ include "plaserve.grace" . }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ .values.spread }}
    labelSelector:
      matchLabels:
        {{- include "plaserve.selector" . | nindent 8 }}
    {{- if ne .role "worker" }}
    matchLabelKeys: [pod-template-hash]
    {{- end }}
{{- end }}
{{- end }}

{{- define "plaserve.nodes" -}}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* gRPC port of a role. */}}
{{- define "plaserve.port" -}}
{{- ternary .root.Values.ports.grpc .root.Values.ports.fleet (eq .role "frontend") -}}
{{- end }}

{{/* Where a plaintext health service answers, if anywhere. */}}
{{- define "plaserve.healthPort" -}}
{{- if .root.Values.probes.healthPort -}}
{{ .root.Values.probes.healthPort }}
{{- else if and (eq .role "frontend") (not .root.Values.tls.frontendSecret) -}}
{{ .root.Values.ports.grpc }}
{{- end }}
{{- end }}

{{- define "plaserve.probe" -}}
{{- with include "plaserve.healthPort" . -}}
grpc:
  port: {{ . }}
  service: ""
{{- else -}}
tcpSocket:
  port: grpc
{{- end }}
timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
{{- end }}

{{/* startSeconds: how long the startup probe waits; until then nothing else kills the process. */}}
{{- define "plaserve.probes" -}}
{{- $p := .root.Values.probes -}}
startupProbe:
  {{- include "plaserve.probe" . | nindent 2 }}
  periodSeconds: {{ $p.periodSeconds }}
  failureThreshold: {{ divf .startSeconds $p.periodSeconds | ceil | int }}
readinessProbe:
  {{- include "plaserve.probe" . | nindent 2 }}
  periodSeconds: {{ $p.periodSeconds }}
  failureThreshold: {{ $p.readinessFailures }}
livenessProbe:
  {{- include "plaserve.probe" . | nindent 2 }}
  periodSeconds: {{ $p.livenessPeriodSeconds }}
  failureThreshold: {{ $p.livenessFailures }}
{{- end }}

{{/* The container of a role; its mounts come last, so that the caller may add more, and then resources. */}}
{{- define "plaserve.container" -}}
{{- $image := include "plaserve.imageOf" . | fromYaml -}}
name: {{ .role }}
image: {{ include "plaserve.image" (dict "root" .root "image" $image) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
command: [plaserve]
args: [{{ .role }}]
workingDir: /var/lib/plaserve
securityContext:
  {{- include "plaserve.containerSafety" . | nindent 2 }}
ports:
  - name: grpc
    containerPort: {{ include "plaserve.port" . }}
  - name: metrics
    containerPort: {{ .root.Values.ports.metrics }}
  {{- with .root.Values.probes.healthPort }}
  - name: health
    containerPort: {{ . }}
  {{- end }}
envFrom:
  - configMapRef:
      name: {{ include "plaserve.object" (dict "root" .root "role" .role) }}
env:
  - name: POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  - name: PLASERVE_FLEET__ADVERTISE
    value: {{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq .root.Values.ipFamily "IPv6") | quote }}
  {{- with .shard }}
  - name: PLASERVE_FLEET__SHARD
    value: {{ ternary "*" . (and (eq $.role "frontend") (dig "allShards" false $.values)) | quote }}
  {{- end }}
  {{- if and .root.Values.etcd.passwordSecret (not .root.Values.etcd.trial.enabled) }}
  {{- range $key := list "username" "password" }}
  - name: PLASERVE_FLEET__{{ upper $key }}
    valueFrom:
      secretKeyRef:
        name: {{ $.root.Values.etcd.passwordSecret | quote }}
        key: {{ $key }}
  {{- end }}
  {{- end }}
  - name: HOME
    value: /var/lib/plaserve
  {{- with .values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if .values.preStopSleepSeconds }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ .values.preStopSleepSeconds }}
{{- end }}
{{ include "plaserve.probes" . }}
volumeMounts:
  - name: var
    mountPath: /var/lib/plaserve
  - name: tmp
    mountPath: /tmp
  {{- if include "plaserve.bundleSource" . }}
  - name: bundle
    mountPath: {{ .root.Values.bundle.path }}
    readOnly: true
    {{- if and (eq (include "plaserve.bundleSource" .) "pvc") .root.Values.bundle.pvc.subPath }}
    subPath: {{ .root.Values.bundle.pvc.subPath | quote }}
    {{- end }}
  {{- end }}
  {{- range $name, $secret := include "plaserve.secrets" . | fromYaml }}
  - name: tls-{{ $name }}
    mountPath: /etc/plaserve/tls/{{ $name }}
    readOnly: true
  {{- end }}
{{- end }}

{{/* Name under /etc/plaserve/tls -> secret. */}}
{{- define "plaserve.secrets" -}}
{{- if and (eq .role "frontend") .root.Values.tls.frontendSecret }}
frontend: {{ .root.Values.tls.frontendSecret | quote }}
{{- end }}
links: {{ required "tls.linksSecret: the processes of a fleet speak mutual TLS; name their secret" .root.Values.tls.linksSecret | quote }}
{{- with include "plaserve.etcdTls" .root }}
etcd: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "plaserve.volumes" -}}
- name: var
  emptyDir:
    sizeLimit: {{ .root.Values.scratch.size }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .root.Values.scratch.size }}
{{- if include "plaserve.bundleSource" . }}
- name: bundle
  {{- if eq (include "plaserve.bundleSource" .) "pvc" }}
  persistentVolumeClaim:
    claimName: {{ required "bundle.pvc.claimName: name the claim that holds the bundle" .root.Values.bundle.pvc.claimName | quote }}
    readOnly: true
  {{- else }}
  emptyDir:
    sizeLimit: {{ .root.Values.bundle.fetch.size }}
  {{- end }}
{{- end }}
{{- range $name, $secret := include "plaserve.secrets" . | fromYaml }}
- name: tls-{{ $name }}
  secret:
    secretName: {{ $secret | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* Downloads the bundle. On a GPU worker it has the worker's own GPU, so that the manifest is checked first. */}}
{{- define "plaserve.fetch" -}}
{{- if eq (include "plaserve.bundleSource" .) "fetch" }}
{{- $fetch := .root.Values.bundle.fetch -}}
{{- $image := include "plaserve.imageOf" . | fromYaml -}}
{{- $url := required "bundle.fetch.url: name the bundle, or a name in a store" $fetch.url -}}
{{- $gpu := and (eq .role "worker") (include "plaserve.onGpu" .root) $fetch.checkHost -}}
initContainers:
  - name: fetch-bundle
    image: {{ include "plaserve.image" (dict "root" .root "image" $image) | quote }}
    imagePullPolicy: {{ $image.pullPolicy }}
    command: [plaserve]
    args:
      - bundles
      - fetch
      - {{ $url | quote }}
      - {{ .root.Values.bundle.path | quote }}
      {{- if $gpu }}
      - --python
      - {{ .root.Values.worker.python | quote }}
      {{- else }}
      - --any-host
      {{- end }}
    workingDir: /var/lib/plaserve
    securityContext:
      {{- include "plaserve.containerSafety" . | nindent 6 }}
    env:
      - name: HOME
        value: /var/lib/plaserve
    {{- with $fetch.envFrom }}
    envFrom:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- $resources := deepCopy $fetch.resources }}
    {{- if $gpu }}
    {{- $_ := set $resources "limits" (merge (dict .root.Values.worker.gpu.resource 1) $resources.limits) }}
    {{- end }}
    resources:
      {{- toYaml $resources | nindent 6 }}
    volumeMounts:
      - name: bundle
        mountPath: {{ .root.Values.bundle.path }}
      - name: var
        mountPath: /var/lib/plaserve
      - name: tmp
        mountPath: /tmp
{{- end }}
{{- end }}
