{{/*
Settings become PLASERVE_<GROUP>__<KEY> in a ConfigMap of the role. What follows from other values of the chart is
set here and refused in `settings`, so that the two can't contradict each other. The service refuses unknown keys.
*/}}

{{- define "plaserve.listen" -}}
{{ printf "%s:%v" (ternary "[::]" "0.0.0.0" (eq .root.Values.ipFamily "IPv6")) .root.Values.ports.fleet }}
{{- end }}

{{- define "plaserve.ownSettings" -}}
{{- $v6 := eq .root.Values.ipFamily "IPv6" -}}
{{- if eq .role "frontend" }}
PLASERVE_SERVER__HOST: {{ ternary "[::]" "0.0.0.0" $v6 | quote }}
PLASERVE_SERVER__PORT: {{ .root.Values.ports.grpc | quote }}
{{- else }}
PLASERVE_FLEET__LISTEN: {{ include "plaserve.listen" . | quote }}
{{- end }}
PLASERVE_SERVER__DRAIN_TIMEOUT_S: {{ toJson .values.drainTimeoutSeconds | quote }}
PLASERVE_TELEMETRY__METRICS: "true"
PLASERVE_TELEMETRY__METRICS_HOST: {{ ternary "::" "0.0.0.0" $v6 | quote }}
PLASERVE_TELEMETRY__METRICS_PORT: {{ .root.Values.ports.metrics | quote }}
PLASERVE_FLEET__MEMBERSHIP: etcd
PLASERVE_FLEET__HEALTH_HOST: {{ ternary "[::]" "0.0.0.0" $v6 | quote }}
PLASERVE_FLEET__HEALTH_PORT: {{ .root.Values.probes.healthPort | quote }}
PLASERVE_FLEET__ENDPOINTS: {{ include "plaserve.etcdEndpoints" .root | quote }}
PLASERVE_FLEET__NAME: {{ default (include "plaserve.name" .root) .root.Values.fleet.name | quote }}
PLASERVE_FLEET__LEASE_TTL_S: {{ toJson .root.Values.fleet.leaseTtlSeconds | quote }}
PLASERVE_FLEET__LINK_AUTHORITY: /etc/plaserve/tls/links/ca.crt
PLASERVE_FLEET__LINK_CERTIFICATE: /etc/plaserve/tls/links/tls.crt
PLASERVE_FLEET__LINK_KEY: /etc/plaserve/tls/links/tls.key
PLASERVE_FLEET__LINK_SERVER_NAME: {{ .root.Values.tls.linksName | quote }}
{{- if include "plaserve.etcdTls" .root }}
PLASERVE_FLEET__TLS: "true"
PLASERVE_FLEET__TLS_CA: /etc/plaserve/tls/etcd/ca.crt
{{- if .root.Values.etcd.clientCertificate }}
PLASERVE_FLEET__TLS_CERT: /etc/plaserve/tls/etcd/tls.crt
PLASERVE_FLEET__TLS_KEY: /etc/plaserve/tls/etcd/tls.key
{{- end }}
{{- with .root.Values.etcd.tlsName }}
PLASERVE_FLEET__TLS_NAME: {{ . | quote }}
{{- end }}
{{- else }}
PLASERVE_FLEET__ALLOW_PLAINTEXT: "true"
{{- end }}
{{- if include "plaserve.bundleSource" . }}
PLASERVE_ENGINE__BUNDLE: {{ .root.Values.bundle.path | quote }}
{{- end }}
PLASERVE_ENGINE__BACKEND: {{ .root.Values.worker.backend }}
{{- if eq .role "worker" }}
{{- if include "plaserve.onGpu" .root }}
PLASERVE_EXECUTOR__PYTHON: {{ .root.Values.worker.python | quote }}
PLASERVE_EXECUTOR__LOG: /var/lib/plaserve/executor.log
PLASERVE_EXECUTOR__START_TIMEOUT_S: {{ toJson .root.Values.worker.startTimeoutSeconds | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* pvc, fetch or nothing. */}}
{{- define "plaserve.bundleSource" -}}
{{- $source := index .root.Values.bundle.source .role -}}
{{- if ne $source "none" }}{{ $source }}{{ end }}
{{- end }}

{{/* (root, role, values) -> the data of the role's ConfigMap. */}}
{{- define "plaserve.settings" -}}
{{- $own := include "plaserve.ownSettings" . | fromYaml -}}
{{- $fixed := list "PLASERVE_FLEET__SHARD" "PLASERVE_FLEET__ADVERTISE" "PLASERVE_FLEET__LISTEN" "PLASERVE_FLEET__MEMBER_ID" -}}
{{- $fixed = concat $fixed (list "PLASERVE_SERVER__HOST" "PLASERVE_SERVER__PORT" "PLASERVE_ENGINE__BUNDLE") -}}
{{- $fixed = concat $fixed (list "PLASERVE_EXECUTOR__PYTHON" "PLASERVE_EXECUTOR__LOG" "PLASERVE_EXECUTOR__START_TIMEOUT_S") -}}
{{- $wanted := dict "PLASERVE_TELEMETRY__SERVICE_NAME" (printf "plaserve-%s" .role) -}}
{{- range $given := list .root.Values.settings .values.settings -}}
{{- range $group, $keys := $given -}}
{{- if kindIs "map" $keys -}}
{{- range $key, $value := $keys -}}
{{- $_ := set $wanted (printf "PLASERVE_%s__%s" (upper $group) (upper $key)) $value -}}
{{- end -}}
{{- else -}}
{{- $_ := set $wanted (printf "PLASERVE_%s" (upper $group)) $keys -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $wanted -}}
{{- if or (hasKey $own $name) (has $name $fixed) -}}
{{- fail (printf "settings of %s: %s follows from other values of the chart; set it there" $.role $name) -}}
{{- end -}}
{{- if or (kindIs "map" $value) (kindIs "slice" $value) -}}
{{- fail (printf "settings of %s: %s must be text, a number, true or false" $.role $name) -}}
{{- end }}
{{ $name }}: {{ if kindIs "string" $value }}{{ quote $value }}{{ else }}{{ toJson $value | quote }}{{ end }}
{{- end }}
{{- range $name, $value := $own }}
{{ $name }}: {{ quote $value }}
{{- end }}
{{- end }}
