{{/* Amounts and times that follow from others. */}}

{{/* A Kubernetes quantity in bytes. */}}
{{- define "loraplex.bytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $scales := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if not (hasKey $scales $unit) -}}
{{- fail (printf "%q is no quantity of bytes, such as 16Gi" $text) -}}
{{- end -}}
{{- mulf (float64 $number) (float64 (index $scales $unit)) | int64 -}}
{{- end -}}

{{/* A pool's values: the worker's, with what the pool says otherwise. dict: root, pool */}}
{{- define "loraplex.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.worker) (deepCopy .pool) | toYaml -}}
{{- end -}}

{{/* The longest drain of a router or a pool. dict: root, of */}}
{{- define "loraplex.drainSeconds" -}}
{{- if kindIs "invalid" .of.drainSeconds -}}{{ .root.Values.requestTimeoutSeconds }}{{- else -}}{{ .of.drainSeconds }}{{- end -}}
{{- end -}}

{{/* From the beginning of a stop to its end, when everything takes as long as it may. dict: root, of */}}
{{- define "loraplex.stopSeconds" -}}
{{- add .of.preStopSeconds (.of.drainDelaySeconds | default 0) (include "loraplex.drainSeconds" .) -}}
{{- end -}}

{{/* dict: root, of */}}
{{- define "loraplex.graceSeconds" -}}
{{- $needed := add (include "loraplex.stopSeconds" .) 15 -}}
{{- if kindIs "invalid" .of.terminationGracePeriodSeconds -}}{{ $needed }}{{- else -}}{{ .of.terminationGracePeriodSeconds }}{{- end -}}
{{- end -}}

{{/* The most workers that a pool may have. dict: pool */}}
{{- define "loraplex.pool.most" -}}
{{- if not (kindIs "invalid" .pool.maxReplicas) -}}{{ .pool.maxReplicas }}
{{- else if ne .pool.autoscaling.kind "none" -}}{{ .pool.autoscaling.maxReplicas }}
{{- else -}}{{ .pool.replicas }}
{{- end -}}
{{- end -}}

{{/* The fewest workers that a pool has when nothing is wrong. dict: pool */}}
{{- define "loraplex.pool.fewest" -}}
{{- if ne .pool.autoscaling.kind "none" -}}{{ .pool.autoscaling.minReplicas }}{{- else -}}{{ .pool.replicas }}{{- end -}}
{{- end -}}

{{/* dict: pool */}}
{{- define "loraplex.pool.adapterDisk" -}}
{{- if kindIs "invalid" .pool.adapterDisk -}}
{{- divf (float64 (include "loraplex.bytes" .pool.cache.size)) 3.0 | int64 -}}
{{- else -}}
{{- include "loraplex.bytes" .pool.adapterDisk -}}
{{- end -}}
{{- end -}}
