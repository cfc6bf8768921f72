{{/* What workers are scaled by, as routers see it: true demand, waiting requests included. */}}

{{- define "loraplex.pressure" -}}
loraplex_requests_running: {{ .requestsPerWorker }}
loraplex_queue_sequences: {{ .queuedPerWorker }}
loraplex_waiting_room_requests: {{ .queuedPerWorker }}
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
