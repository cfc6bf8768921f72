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

{{/* Ports of a URL's hosts, which commas part. dict: url, usual: where none is written */}}
{{- define "loraplex.ports" -}}
{{- $ports := list -}}
{{- $hosts := regexReplaceAll "[/?#].*$" (regexReplaceAll "^[^:]+://" .url "") "" -}}
{{- range splitList "," (regexReplaceAll "^[^@]*@" $hosts "") -}}
{{- $port := regexFind ":[0-9]+$" (regexReplaceAll "^\\[[^\\]]*\\]" . "") -}}
{{- $ports = append $ports (trimPrefix ":" (default $.usual $port) | int) -}}
{{- end -}}
{{- uniq $ports | toJson -}}
{{- end -}}

{{/* Ports of an external Redis, as its URL says; behind sentinels masters have the usual one. */}}
{{- define "loraplex.redis.ports" -}}
{{- if hasPrefix "redis+sentinel:" .Values.redis.url -}}
{{- $sentinels := include "loraplex.ports" (dict "url" .Values.redis.url "usual" "26379") | fromJsonArray -}}
{{- append $sentinels 6379.0 | uniq | toJson -}}
{{- else -}}
{{- include "loraplex.ports" (dict "url" .Values.redis.url "usual" "6379") -}}
{{- end -}}
{{- end -}}
