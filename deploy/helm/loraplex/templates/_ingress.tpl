{{/* First parts of the paths that pass. dict: root, of */}}
{{- define "loraplex.paths" -}}
{{- default (.root.Files.Get "routes.yaml" | fromYamlArray) .of.paths | toYaml -}}
{{- end -}}

{{/* For ingress-nginx: streams are passed on as they come, and no request is cut before the router ends it. */}}
{{- define "loraplex.ingress.nginx" -}}
{{- $seconds := add .Values.requestTimeoutSeconds 30 }}
nginx.ingress.kubernetes.io/proxy-buffering: "off"
nginx.ingress.kubernetes.io/proxy-request-buffering: "off"
nginx.ingress.kubernetes.io/proxy-read-timeout: {{ $seconds | quote }}
nginx.ingress.kubernetes.io/proxy-send-timeout: {{ $seconds | quote }}
# The router bounds bodies itself, and says so in its own words.
nginx.ingress.kubernetes.io/proxy-body-size: "0"
{{- if .Values.router.tlsSecretName }}
nginx.ingress.kubernetes.io/backend-protocol: HTTPS
{{- end }}
{{- end -}}
