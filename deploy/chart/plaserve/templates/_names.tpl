{{/* Names, labels, images. Roles: frontend, scheduler, worker, controller; etcd beside them. */}}

{{- define "plaserve.name" -}}
{{- $given := .Values.fullnameOverride -}}
{{- $auto := ternary .Release.Name (printf "%s-plaserve" .Release.Name) (contains "plaserve" .Release.Name) -}}
{{- default $auto $given | trunc 28 | trimSuffix "-" -}}
{{- end }}

{{/* Name of an object of a role: (root, role, shard or ""). 52 characters at most, for StatefulSets. */}}
{{- define "plaserve.object" -}}
{{- $base := printf "%s-%s" (include "plaserve.name" .root) .role -}}
{{- if .shard }}{{ printf "%s-%s" $base .shard }}{{ else }}{{ $base }}{{ end }}
{{- end }}

{{/* What selects pods: (root, role, shard). Never changes for a running object, so no versions here. */}}
{{- define "plaserve.selector" -}}
app.kubernetes.io/name: plaserve
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .role }}
{{- with .shard }}
plaserve-shard: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "plaserve.labels" -}}
{{ include "plaserve.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end }}

{{- define "plaserve.image" -}}
{{- $tag := default .root.Chart.AppVersion .image.tag -}}
{{- if .image.digest -}}
{{ printf "%s@%s" .image.repository .image.digest }}
{{- else -}}
{{ printf "%s:%s" .image.repository $tag }}
{{- end }}
{{- end }}

{{- define "plaserve.onGpu" -}}
{{- if has .Values.worker.backend (list "trtllm" "trtllm_torch") }}true{{ end }}
{{- end }}

{{/* Image values of a role. */}}
{{- define "plaserve.imageOf" -}}
{{- if and (eq .role "worker") (include "plaserve.onGpu" .root) -}}
{{ toYaml .root.Values.images.worker }}
{{- else -}}
{{ toYaml .root.Values.images.service }}
{{- end }}
{{- end }}

{{- define "plaserve.etcdEndpoints" -}}
{{- if .Values.etcd.trial.enabled -}}
{{ printf "%s.%s.svc:2379" (include "plaserve.object" (dict "root" . "role" "etcd")) .Release.Namespace | list | toJson }}
{{- else -}}
{{- if not .Values.etcd.endpoints }}{{ fail "etcd.endpoints: name host:port of your etcd, or set etcd.trial.enabled" }}{{ end -}}
{{ toJson .Values.etcd.endpoints }}
{{- end }}
{{- end }}

{{/* Secret of etcd, where TLS is spoken to it. */}}
{{- define "plaserve.etcdTls" -}}
{{- if not .Values.etcd.trial.enabled -}}
{{- if not (or .Values.etcd.tlsSecret .Values.etcd.allowPlaintext) -}}
{{- fail "etcd.tlsSecret: name a secret, or set etcd.allowPlaintext where the network is trusted" -}}
{{- end -}}
{{ .Values.etcd.tlsSecret }}
{{- end }}
{{- end }}

{{/* Grace period of a role: what its pod may take from the decision to its end. */}}
{{- define "plaserve.grace" -}}
{{- add (ceil .values.preStopSleepSeconds) (ceil .values.drainTimeoutSeconds) (ceil .values.graceMarginSeconds) -}}
{{- end }}
