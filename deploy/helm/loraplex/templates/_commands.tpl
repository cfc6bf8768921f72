{{/* Command lines of routers and workers. */}}

{{- define "loraplex.router.args" -}}
{{- $values := .Values }}
- router
- "--host=0.0.0.0"
- "--port={{ $values.router.port }}"
{{- range $given := $values.pools }}
{{- $pool := include "loraplex.pool" (dict "root" $ "pool" $given) | fromYaml }}
{{- range $number := until (int (include "loraplex.pool.most" (dict "pool" $pool))) }}
- "--worker=ws://{{ include "loraplex.pool.name" (dict "root" $ "pool" $pool) }}-{{ $number }}.{{ include "loraplex.workers.service" $ }}.{{ $.Release.Namespace }}.svc.{{ $values.clusterDomain }}:8090"
{{- end }}
{{- end }}
{{- range include "loraplex.bases" $ | fromYamlArray }}
- {{ printf "--base=%s" . | quote }}
{{- end }}
- "--secret-file=/etc/loraplex/credentials/workers"
{{- if $values.secrets.adminKey.name }}
- "--admin-key-file=/etc/loraplex/credentials/adminKey"
{{- end }}
{{- if $values.secrets.apiKeys.name }}
- "--keys-file=/etc/loraplex/credentials/apiKeys"
{{- end }}
{{- if $values.secrets.adapterHub.name }}
- "--hub-token-file=/etc/loraplex/credentials/adapterHub"
{{- end }}
{{- if ne $values.redis.mode "none" }}
- {{ eq $values.redis.mode "bundled" | ternary (printf "--redis=redis://loraplex@%s:6379/0" (include "loraplex.redis.name" $)) (printf "--redis=%s" $values.redis.url) | quote }}
- {{ printf "--redis-prefix=%s" (default (printf "%s.%s" $.Release.Namespace (include "loraplex.fullname" $)) $values.redis.prefix) | quote }}
{{- if include "loraplex.secret" (dict "root" $ "purpose" "redis") }}
- "--redis-password-file=/etc/loraplex/credentials/redis"
{{- end }}
{{- end }}
{{- with $values.tracing.endpoint }}
- {{ printf "--otlp-endpoint=%s" . | quote }}
{{- end }}
- "--cache-dir=/var/cache/loraplex"
- "--adapters-file=/etc/loraplex/adapters/adapters.yaml"
{{- if $values.router.filesClaim }}
- "--files-dir=/var/lib/loraplex/files"
- "--upload-store=/var/lib/loraplex/files/uploads"
{{- end }}
- "--request-timeout-s={{ $values.requestTimeoutSeconds }}"
- "--drain-delay-s={{ $values.router.drainDelaySeconds }}"
- "--drain-timeout-s={{ include "loraplex.drainSeconds" (dict "root" $ "of" $values.router) }}"
{{- if $values.router.tlsSecretName }}
- "--tls-cert=/etc/loraplex/tls/tls.crt"
- "--tls-key=/etc/loraplex/tls/tls.key"
{{- end }}
{{- range $values.hubOwners }}
- {{ printf "--hub-owner=%s" . | quote }}
{{- end }}
{{- include "loraplex.flags" $values.router.options }}
{{- end -}}

{{/* dict: root, pool */}}
{{- define "loraplex.worker.args" -}}
{{- $values := .root.Values }}
{{- $pool := .pool }}
{{- $model := $values.model }}
{{- range $values.bases }}
{{- if eq .name $pool.base }}
{{- $model = dict "id" .id "revision" (default "" .revision) "names" (list .name) }}
{{- end }}
{{- end }}
- worker
- {{ $model.id | quote }}
{{- with $model.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- range $model.names }}
- {{ printf "--model-name=%s" . | quote }}
{{- end }}
- "--host=0.0.0.0"
- "--port=8090"
- "--worker-id=$(POD_NAME)"
- "--device={{ ternary "cuda" "cpu" (gt (int $pool.gpus) 0) }}"
{{- if gt (int $pool.gpus) 1 }}
- "--tp={{ int $pool.gpus }}"
{{- end }}
- "--secret-file=/etc/loraplex/credentials/workers"
- "--cache-dir=/var/cache/loraplex/adapters"
- "--adapter-disk={{ include "loraplex.pool.adapterDisk" . }}"
- "--host-adapter-memory={{ include "loraplex.bytes" $pool.hostAdapterMemory }}"
- "--drain-timeout-s={{ include "loraplex.drainSeconds" (dict "root" .root "of" $pool) }}"
{{- range $values.hubOwners }}
- {{ printf "--hub-owner=%s" . | quote }}
{{- end }}
{{- include "loraplex.flags" $pool.options }}
{{- end -}}

{{/* What libraries below the worker read. dict: root, pool */}}
{{- define "loraplex.worker.env" -}}
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- { name: HOME, value: /var/cache/loraplex }
- { name: HF_HOME, value: {{ ternary "/var/cache/huggingface" "/var/cache/loraplex/huggingface" (ne .pool.hubCacheClaim "") }} }
{{- if .root.Values.secrets.modelHub.name }}
- { name: HF_TOKEN_PATH, value: /etc/loraplex/credentials/modelHub }
{{- end }}
{{- with .root.Values.secrets.s3 }}
{{- if .name }}
- name: AWS_ACCESS_KEY_ID
  valueFrom: { secretKeyRef: { name: {{ .name | quote }}, key: {{ .accessKeyId | quote }} } }
- name: AWS_SECRET_ACCESS_KEY
  valueFrom: { secretKeyRef: { name: {{ .name | quote }}, key: {{ .secretAccessKey | quote }} } }
{{- with .sessionToken }}
- name: AWS_SESSION_TOKEN
  valueFrom: { secretKeyRef: { name: {{ $.root.Values.secrets.s3.name | quote }}, key: {{ . | quote }} } }
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq (int .pool.gpus) 0) .pool.resources.limits.cpu }}
# Threads as the container has CPUs, not the node.
- name: OMP_NUM_THREADS
  valueFrom: { resourceFieldRef: { resource: limits.cpu } }
{{- end }}
{{- with .pool.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
