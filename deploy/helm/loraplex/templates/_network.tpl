{{/* What leaves routers and workers: names, the ports outside, and what the operator adds. */}}
{{- define "loraplex.egress" -}}
- ports:
    - { port: 53, protocol: UDP }
    - { port: 53, protocol: TCP }
  to:
    - namespaceSelector: {}
{{- with .Values.networkPolicy.egressPorts }}
- ports:
    {{- range . }}
    - { port: {{ . }}, protocol: TCP }
    {{- end }}
{{- end }}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Ports of an external Redis, as its URL says; behind sentinels masters have the usual one. */}}
{{- define "loraplex.redis.ports" -}}
{{- $ports := list -}}
{{- range regexFindAll ":[0-9]+" .Values.redis.url -1 -}}{{- $ports = append $ports (trimPrefix ":" . | int) -}}{{- end -}}
{{- if or (not $ports) (hasPrefix "redis+sentinel:" .Values.redis.url) -}}{{- $ports = append $ports 6379 -}}{{- end -}}
{{- uniq $ports | toJson -}}
{{- end -}}
