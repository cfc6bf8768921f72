{{/* Names, labels, images. */}}

{{- define "loraplex.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 26 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 26 characters: a worker's pod is called <this>-worker-<pool>-<n>, in labels of 63. */}}
{{- define "loraplex.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 26 | trimSuffix "-" -}}
{{- else if contains (include "loraplex.name" .) .Release.Name -}}
{{- .Release.Name | trunc 26 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "loraplex.name" .) | trunc 26 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "loraplex.router.name" -}}
{{- include "loraplex.fullname" . }}-router
{{- end -}}

{{- define "loraplex.redis.name" -}}
{{- include "loraplex.fullname" . }}-redis
{{- end -}}

{{/* The headless Service that gives workers their addresses. */}}
{{- define "loraplex.workers.service" -}}
{{- include "loraplex.fullname" . }}-workers
{{- end -}}

{{/* dict: root, pool */}}
{{- define "loraplex.pool.name" -}}
{{- include "loraplex.fullname" .root }}-worker-{{ .pool.name }}
{{- end -}}

{{/* dict: root, component */}}
{{- define "loraplex.selector" -}}
app.kubernetes.io/name: {{ include "loraplex.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* dict: root, component */}}
{{- define "loraplex.labels" -}}
{{ include "loraplex.selector" . }}
app.kubernetes.io/part-of: loraplex
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Of pods: nothing that a new release of the chart alone would change, since that would replace them. */}}
{{- define "loraplex.podLabels" -}}
{{ include "loraplex.selector" . }}
app.kubernetes.io/part-of: loraplex
{{- end -}}

{{/* dict: root, pool */}}
{{- define "loraplex.pool.selector" -}}
{{ include "loraplex.selector" (dict "root" .root "component" "worker") }}
loraplex/pool: {{ .pool.name | quote }}
{{- end -}}

{{/* dict: root, image */}}
{{- define "loraplex.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end -}}
{{- end -}}

{{/* dict: root, component */}}
{{- define "loraplex.serviceAccount" -}}
{{- $account := index .root.Values.serviceAccounts .component -}}
{{- if $account.create -}}
{{- default (printf "%s-%s" (include "loraplex.fullname" .root) .component) $account.name -}}
{{- else -}}
{{- default "default" $account.name -}}
{{- end -}}
{{- end -}}

{{/* Names of the bases, as routers and metrics have them: none where there is one base. */}}
{{- define "loraplex.bases" -}}
{{- $names := list -}}
{{- if .Values.bases -}}
{{- $id := .Values.model.id -}}
{{- $own := ternary (base $id) $id (hasPrefix "/" $id) -}}
{{- $names = append $names (default $own (first .Values.model.names)) -}}
{{- range .Values.bases -}}{{- $names = append $names .name -}}{{- end -}}
{{- end -}}
{{ toYaml $names }}
{{- end -}}

{{/* What selects the routers' series of a pool's base. dict: root, pool */}}
{{- define "loraplex.pool.series" -}}
namespace: {{ .root.Release.Namespace | quote }}
service: {{ include "loraplex.router.name" .root | quote }}
{{- with include "loraplex.bases" .root | fromYamlArray }}
base: {{ default (first .) $.pool.base | quote }}
{{- end }}
{{- end -}}
