{{/* What workers are scaled by, as routers see it: true demand, waiting requests included. */}}

{{/* dict: root, scaling. Of several bases one is also wanted by requests that did not wait. */}}
{{- define "loraplex.pressure" -}}
loraplex_requests_running: {{ .scaling.requestsPerWorker }}
loraplex_queue_sequences: {{ .scaling.queuedPerWorker }}
loraplex_waiting_room_requests: {{ .scaling.queuedPerWorker }}
{{- if .root.Values.bases }}
loraplex_base_wanted: {{ .scaling.queuedPerWorker }}
{{- end }}
{{- end -}}

{{/* Up at once, down slowly: a worker takes minutes to load its model. */}}
{{- define "loraplex.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - { type: Percent, value: 100, periodSeconds: 60 }
    - { type: Pods, value: 2, periodSeconds: 60 }
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownSeconds }}
  policies:
    - { type: Pods, value: 1, periodSeconds: 120 }
{{- end -}}
