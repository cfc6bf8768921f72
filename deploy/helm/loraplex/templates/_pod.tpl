{{/* What pods have in common. */}}

{{- define "loraplex.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsUser }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "loraplex.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* An options map as flags. A list's flag is repeated; a switch is --flag or --no-flag. */}}
{{- define "loraplex.flags" -}}
{{- range $flag, $value := . }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag | quote }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%v" $flag . | quote }}
{{- end }}
{{- else if kindIs "float64" $value }}
- {{ printf "--%s=%s" $flag (ternary (printf "%d" (int64 $value)) (toString $value) (eq (float64 (int64 $value)) $value)) | quote }}
{{- else }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Credentials as files. dict: root, names: of `secrets` */}}
{{- define "loraplex.credentials" -}}
- name: credentials
  projected:
    defaultMode: 0440
    sources:
    {{- range .names }}
    {{- $secret := index $.root.Values.secrets . }}
    {{- $name := include "loraplex.secret" (dict "root" $.root "purpose" .) }}
    {{- if $name }}
      - secret:
          name: {{ $name | quote }}
          items:
            - { key: {{ $secret.key | quote }}, path: {{ . | quote }} }
    {{- end }}
    {{- end }}
{{- end -}}

{{/* The Secret of a credential; empty where there is none. dict: root, purpose */}}
{{- define "loraplex.secret" -}}
{{- $name := (index .root.Values.secrets .purpose).name -}}
{{- if $name -}}{{ $name }}
{{- else if or (eq .purpose "workers") (and (eq .purpose "redis") (eq .root.Values.redis.mode "bundled")) -}}
{{ include "loraplex.fullname" .root }}-{{ .purpose }}
{{- end -}}
{{- end -}}

{{/* dict: of (router or pool) */}}
{{- define "loraplex.placement" -}}
{{- with .of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* dict: of, selector (text), revision: a label whose values are spread apart */}}
{{- define "loraplex.spread" -}}
{{- if eq (toString .of.topologySpreadConstraints) "default" }}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ $.selector | nindent 8 }}
    matchLabelKeys: [{{ $.revision }}]
  {{- end }}
{{- else if .of.topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml .of.topologySpreadConstraints | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Waits before SIGTERM: what still comes on new connections is served. dict: of */}}
{{- define "loraplex.preStop" -}}
{{- if .of.preStopSeconds }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ .of.preStopSeconds | quote }}]
{{- end }}
{{- end -}}

{{/* dict: path, port, period, timeout, failures, scheme */}}
{{- define "loraplex.probe" -}}
httpGet: { path: {{ .path }}, port: {{ .port }}{{ with .scheme }}, scheme: {{ . }}{{ end }} }
periodSeconds: {{ .period }}
timeoutSeconds: {{ .timeout }}
failureThreshold: {{ .failures }}
{{- end -}}
