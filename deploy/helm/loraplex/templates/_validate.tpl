{{/* What the schema cannot say: values that do not fit together. Each message says what to change. */}}

{{- define "loraplex.validate" -}}
{{- include "loraplex.validate.needed" . -}}
{{- include "loraplex.validate.options" (dict "root" . "of" .Values.router "where" "router" "command" "router") -}}
{{- include "loraplex.validate.options" (dict "root" . "of" .Values.worker "where" "worker" "command" "worker") -}}
{{- range .Values.pools -}}
{{- include "loraplex.validate.options" (dict "root" $ "of" . "where" (printf "pool %s:" .name) "command" "worker") -}}
{{- end -}}
{{- include "loraplex.validate.times" (dict "root" . "of" .Values.router "where" "router") -}}
{{- if .Values.router.autoscaling.enabled -}}
{{- include "loraplex.validate.bounds" (dict "scaling" .Values.router.autoscaling "where" "router") -}}
{{- end -}}
{{- include "loraplex.validate.names" . -}}
{{- include "loraplex.validate.bases" . -}}
{{- $fewest := 0 -}}
{{- range $given := .Values.pools -}}
{{- $pool := include "loraplex.pool" (dict "root" $ "pool" $given) | fromYaml -}}
{{- $fewest = add $fewest (include "loraplex.pool.fewest" (dict "pool" $pool)) -}}
{{- $scope := dict "root" $ "pool" $pool "of" $pool "where" (printf "pool %s" $pool.name) -}}
{{- include "loraplex.validate.times" $scope -}}
{{- include "loraplex.validate.scaling" $scope -}}
{{- include "loraplex.validate.memory" $scope -}}
{{- include "loraplex.validate.adapters" $scope -}}
{{- end -}}
{{- include "loraplex.validate.moves" (dict "root" . "fewest" $fewest) -}}
{{- include "loraplex.validate.outside" . -}}
{{- end -}}

{{- define "loraplex.validate.needed" -}}
{{- if not .Values.model.id -}}{{- fail "model.id is needed: the Hub id or folder of the base model" -}}{{- end -}}
{{- range list "router" "worker" -}}
{{- if not (index $.Values.images .).repository -}}
{{- fail (printf "images.%s.repository is needed: build deploy/images/%s.Dockerfile, push it, and name it here" . .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Options of earlier versions, and those that the chart sets. dict: root, of, where, command */}}
{{- define "loraplex.validate.options" -}}
{{- $gone := index (.root.Files.Get "options.gone.yaml" | fromYaml) .command -}}
{{- range $flag, $_ := .of.options -}}
{{- with index $gone $flag -}}
{{- fail (printf "%s options.%s %s" $.where $flag .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* dict: root, of, where */}}
{{- define "loraplex.validate.times" -}}
{{- $drain := int (include "loraplex.drainSeconds" .) -}}
{{- $grace := int (include "loraplex.graceSeconds" .) -}}
{{- $request := int .root.Values.requestTimeoutSeconds -}}
{{- $needed := add (include "loraplex.stopSeconds" .) 10 -}}
{{- if lt $grace (int $needed) -}}
{{- fail (printf "%s: terminationGracePeriodSeconds is %d, but a stop may take %s s (preStopSeconds, drainDelaySeconds, drainSeconds) and needs at least %d: the rest would be killed" .where $grace (include "loraplex.stopSeconds" .) $needed) -}}
{{- end -}}
{{- if and (eq .where "router") (lt $drain $request) -}}
{{- fail (printf "router: drainSeconds is %d, but a request may take requestTimeoutSeconds (%d): an update would cut it off" $drain $request) -}}
{{- end -}}
{{- end -}}

{{/* Sequences of a worker that stops go on at another, if there is one. dict: root, fewest */}}
{{- define "loraplex.validate.moves" -}}
{{- $request := int .root.Values.requestTimeoutSeconds -}}
{{- range $given := .root.Values.pools -}}
{{- $pool := include "loraplex.pool" (dict "root" $.root "pool" $given) | fromYaml -}}
{{- $drain := int (include "loraplex.drainSeconds" (dict "root" $.root "of" $pool)) -}}
{{- if and (lt (int $.fewest) 2) (lt $drain $request) -}}
{{- fail (printf "pool %s: drainSeconds is %d, less than requestTimeoutSeconds (%d), and there is no second worker that could go on with what is left: raise it, or have two workers" $pool.name $drain $request) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "loraplex.validate.names" -}}
{{- $own := include "loraplex.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $own) -}}
{{- fail (printf "%q cannot begin the names of Services, which begin with a letter and have no dots: choose another release name, or set fullnameOverride" $own) -}}
{{- end -}}
{{- $router := .Values.serviceAccounts.router -}}
{{- $worker := .Values.serviceAccounts.worker -}}
{{- if and $router.create $worker.create $router.name (eq $router.name $worker.name) -}}
{{- fail (printf "serviceAccounts: %q is created twice: give two names, or create: false for one of them" $router.name) -}}
{{- end -}}
{{- range $what, $list := dict "pools" .Values.pools "adapters" .Values.adapters -}}
{{- $seen := dict -}}
{{- range $list -}}
{{- $name := .name -}}
{{- with .tenant -}}{{- $name = printf "%s::%s" . $name -}}{{- end -}}
{{- if hasKey $seen $name -}}{{- fail (printf "%s: %q is there twice" $what $name) -}}{{- end -}}
{{- $_ := set $seen $name true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Each base has a pool, and each pool a base. */}}
{{- define "loraplex.validate.bases" -}}
{{- $names := include "loraplex.bases" . | fromYamlArray -}}
{{- range $number, $name := $names -}}
{{- $pools := 0 -}}
{{- range $given := $.Values.pools -}}
{{- $pool := include "loraplex.pool" (dict "root" $ "pool" $given) | fromYaml -}}
{{- if or (eq $pool.base $name) (and (eq $number 0) (not $pool.base)) -}}{{- $pools = add1 $pools -}}{{- end -}}
{{- end -}}
{{- if not $pools -}}{{- fail (printf "bases: %q has no pool: give one of pools this base" $name) -}}{{- end -}}
{{- if not (eq (len $names) (len (uniq $names))) -}}{{- fail "bases: a name is there twice" -}}{{- end -}}
{{- end -}}
{{- range $given := .Values.pools -}}
{{- $pool := include "loraplex.pool" (dict "root" $ "pool" $given) | fromYaml -}}
{{- if and $pool.base (not (has $pool.base $names)) -}}
{{- fail (printf "pool %s: base %q is none of bases" $pool.name $pool.base) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* dict: scaling, where */}}
{{- define "loraplex.validate.bounds" -}}
{{- if gt (int .scaling.minReplicas) (int .scaling.maxReplicas) -}}
{{- fail (printf "%s: autoscaling.minReplicas (%d) is above autoscaling.maxReplicas (%d)" .where (int .scaling.minReplicas) (int .scaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}

{{/* dict: root, pool, where */}}
{{- define "loraplex.validate.scaling" -}}
{{- $scaling := .pool.autoscaling -}}
{{- $most := int (include "loraplex.pool.most" .) -}}
{{- if eq $scaling.kind "none" -}}
{{- if gt (int .pool.replicas) $most -}}
{{- fail (printf "%s: replicas is %d, but routers look for maxReplicas (%d) only" .where (int .pool.replicas) $most) -}}
{{- end -}}
{{- else -}}
{{- include "loraplex.validate.bounds" (dict "scaling" $scaling "where" .where) -}}
{{- if gt (int $scaling.maxReplicas) $most -}}
{{- fail (printf "%s: autoscaling.maxReplicas is %d, but routers look for maxReplicas (%d) only" .where (int $scaling.maxReplicas) $most) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $scaling.kind "hpa") (lt (int $scaling.minReplicas) 1) -}}
{{- fail (printf "%s: autoscaling.minReplicas 0 needs autoscaling.kind keda; an HPA keeps at least one" .where) -}}
{{- end -}}
{{- if eq $scaling.kind "keda" -}}
{{- if not .root.Values.monitoring.prometheusAddress -}}
{{- fail (printf "%s: autoscaling.kind keda asks Prometheus for the queue: set monitoring.prometheusAddress" .where) -}}
{{- end -}}
{{- $patience := index .root.Values.router.options "worker-wait-s" | default 10 -}}
{{/* Of several bases one is wanted by requests that got 503, too. */}}
{{- if and (lt (int $scaling.minReplicas) 1) (lt (int $patience) 60) (not .root.Values.bases) -}}
{{- fail (printf "%s: autoscaling.minReplicas 0 needs router.options.worker-wait-s of at least 60, got %v: requests would be given up before a worker has loaded its model" .where $patience) -}}
{{- end -}}
{{- $others := 0 -}}
{{- if .root.Values.bases -}}
{{- range $given := .root.Values.pools -}}
{{- $others = add $others (include "loraplex.pool.fewest" (dict "pool" (include "loraplex.pool" (dict "root" $.root "pool" $given) | fromYaml))) -}}
{{- end -}}
{{- end -}}
{{- if and (lt (int $scaling.minReplicas) 1) (not $others) (not .root.Values.router.readyWithoutWorkers) -}}
{{- fail (printf "%s: autoscaling.minReplicas 0 needs router.readyWithoutWorkers true: without it no request reaches a router to wake a worker" .where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* dict: root, pool, where */}}
{{- define "loraplex.validate.memory" -}}
{{- $arena := int64 (include "loraplex.bytes" .pool.hostAdapterMemory) -}}
{{- $shared := int64 (include "loraplex.bytes" .pool.sharedMemory) -}}
{{- $limit := int64 (include "loraplex.bytes" .pool.resources.limits.memory) -}}
{{- if gt (add $arena $shared 1073741824) $limit -}}
{{- fail (printf "%s: hostAdapterMemory (%v) and sharedMemory (%v) are part of resources.limits.memory (%v), which must leave 1Gi beside them" .where .pool.hostAdapterMemory .pool.sharedMemory .pool.resources.limits.memory) -}}
{{- end -}}
{{- $disk := int64 (include "loraplex.pool.adapterDisk" .) -}}
{{- if gt $disk (int64 (include "loraplex.bytes" .pool.cache.size)) -}}
{{- fail (printf "%s: adapterDisk (%v) is larger than cache.size (%v)" .where .pool.adapterDisk .pool.cache.size) -}}
{{- end -}}
{{- end -}}

{{/* A declared adapter, or a watched folder, that its workers would refuse. dict: root, pool, where */}}
{{- define "loraplex.validate.adapters" -}}
{{- $options := .pool.options -}}
{{- range $folder := index .root.Values.router.options "watch-folder" | default list -}}
{{- $isBelow := false -}}
{{- range index $options "adapter-root" | default list -}}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .)) (printf "%s/" $folder) -}}{{- $isBelow = true -}}{{- end -}}
{{- end -}}
{{- if not $isBelow -}}
{{- fail (printf "router.options.watch-folder: %s may not read %s: mount it there and add it to options.adapter-root" $.where $folder) -}}
{{- end -}}
{{- end -}}
{{- $owners := .root.Values.hubOwners -}}
{{- range $adapter := .root.Values.adapters -}}
{{- $refs := list .ref -}}
{{- range .versions -}}{{- $refs = append $refs .reference -}}{{- end -}}
{{- range $ref := $refs -}}
{{- if hasPrefix "s3:" $ref -}}
{{- $bucket := regexReplaceAll "^s3:/*([^/]+).*$" $ref "${1}" -}}
{{- if not (has $bucket (index $options "s3-bucket" | default list)) -}}
{{- fail (printf "adapters: %q is in the bucket %s, which %s may not read: add it to options.s3-bucket" $adapter.name $bucket $.where) -}}
{{- end -}}
{{- else if hasPrefix "https:" $ref -}}
{{- $host := regexReplaceAll "^https://([^/]+).*$" $ref "${1}" -}}
{{- if not (has $host (index $options "https-host" | default list)) -}}
{{- fail (printf "adapters: %q is on the host %s, which %s may not ask: add it to options.https-host" $adapter.name $host $.where) -}}
{{- end -}}
{{- else if hasPrefix "modelscope:" $ref -}}
{{- $owner := regexReplaceAll "^modelscope:([^/]+)/.*$" $ref "${1}" -}}
{{- $allowed := index $options "modelscope-owner" | default list -}}
{{- if not (or (has $owner $allowed) (has "*" $allowed)) -}}
{{- fail (printf "adapters: %q belongs to %s on ModelScope, whom %s may not ask: add it to options.modelscope-owner" $adapter.name $owner $.where) -}}
{{- end -}}
{{- else if hasPrefix "local:" $ref -}}
{{- if not (index $options "adapter-root") -}}
{{- fail (printf "adapters: %q is a local folder, and %s has no options.adapter-root" $adapter.name $.where) -}}
{{- end -}}
{{- else if and $owners (hasPrefix "hub:" $ref) -}}
{{- $owner := regexReplaceAll "^hub:([^/]+)/.*$" $ref "${1}" -}}
{{- if not (has $owner $owners) -}}
{{- fail (printf "adapters: %q belongs to %s, who is not in hubOwners" $adapter.name $owner) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "loraplex.validate.outside" -}}
{{- if and (eq .Values.redis.mode "external") (not .Values.redis.url) -}}{{- fail "redis.url is needed: where the external Redis is" -}}{{- end -}}
{{- if and (ne .Values.redis.mode "external") .Values.redis.url -}}{{- fail (printf "redis.url is given, but redis.mode is %s, not external" .Values.redis.mode) -}}{{- end -}}
{{- $router := .Values.router -}}
{{- $routers := ternary (int $router.autoscaling.maxReplicas) (int $router.replicas) $router.autoscaling.enabled -}}
{{- if and $router.filesClaim (gt $routers 1) (eq .Values.redis.mode "none") -}}{{- fail (printf "router.filesClaim: %d routers share batches by Redis: set redis.mode, or have one router" $routers) -}}{{- end -}}
{{- $callers := index .Values.router.options "auth" | default "auto" -}}
{{- if and (ne $callers "none") (not .Values.secrets.adminKey.name) (not .Values.secrets.apiKeys.name) -}}{{- fail "callers need keys: name secrets.apiKeys, or secrets.adminKey, with which they are made, or let anyone who reaches the routers use them with router.options.auth: none" -}}{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}{{- fail "ingress.hosts is needed" -}}{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}{{- fail "httpRoute.parentRefs is needed: the gateway that it belongs to" -}}{{- end -}}
{{- end -}}
