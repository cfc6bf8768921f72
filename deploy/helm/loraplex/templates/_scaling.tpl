{{/* What workers are scaled by, as routers see it: true demand, waiting requests included. */}}

{{/* dict: root, pool. Of several bases one is also wanted by requests that did not wait. */}}
{{- define "loraplex.pressure" -}}
{{- $shared := float64 (include "loraplex.pool.shared" .) -}}
{{- $running := round (mulf .pool.autoscaling.requestsPerWorker $shared) 3 -}}
{{- $queued := round (mulf .pool.autoscaling.queuedPerWorker $shared) 3 -}}
loraplex_requests_running: {{ $running }}
loraplex_queue_sequences: {{ $queued }}
loraplex_waiting_room_requests: {{ $queued }}
{{- if .root.Values.bases }}
loraplex_base_wanted: {{ $queued }}
{{- end }}
{{- end -}}

{{/* Pools of one base see the same demand: how many times as large as this pool they are together. dict: root, pool */}}
{{- define "loraplex.pool.shared" -}}
{{- $series := include "loraplex.pool.series" . -}}
{{- $all := 0 -}}
{{- range $given := .root.Values.pools -}}
{{- $other := dict "root" $.root "pool" (include "loraplex.pool" (dict "root" $.root "pool" $given) | fromYaml) -}}
{{- if eq (include "loraplex.pool.series" $other) $series -}}
{{- $all = add $all (include "loraplex.pool.largest" $other) -}}
{{- end -}}
{{- end -}}
{{- divf $all (include "loraplex.pool.largest" .) -}}
{{- end -}}

{{/* The most workers that a pool runs. dict: pool */}}
{{- define "loraplex.pool.largest" -}}
{{- if ne .pool.autoscaling.kind "none" -}}{{ .pool.autoscaling.maxReplicas }}{{- else -}}{{ .pool.replicas }}{{- end -}}
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
