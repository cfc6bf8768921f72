"""What the chart uses of objects that Kubernetes itself does not know, as strict JSON schemas.

Fields as their projects document them: prometheus-operator (monitoring.coreos.com/v1), KEDA
(keda.sh/v1alpha1), Gateway API (gateway.networking.k8s.io/v1).
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"}
COUNT: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}


def table(required: Schema, optional: Schema | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def listing(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def thing(api: str, kind: str, spec: Schema) -> Schema:
    metadata = table({"name": NAME, "labels": LABELS}, {"annotations": LABELS})
    return table(
        {"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    )


SELECTOR = table({"matchLabels": LABELS})
ENDPOINTS = listing(
    table(
        {"port": NAME, "path": TEXT, "interval": DURATION},
        {"scheme": {"enum": ["http", "https"]}}
        | {"tlsConfig": table({"insecureSkipVerify": {"type": "boolean"}})}
        | {"relabelings": listing(table({"targetLabel": TEXT, "replacement": TEXT}))},
    )
)
RULE = table(
    {"expr": {"type": "string", "minLength": 1}},
    {"alert": TEXT, "record": TEXT, "for": DURATION, "keep_firing_for": DURATION}
    | {"labels": LABELS, "annotations": LABELS},
)
GROUP = table({"name": TEXT, "rules": listing(RULE)}, {"interval": DURATION})
BEHAVIOR = table({"scaleUp": {"type": "object"}, "scaleDown": {"type": "object"}})
TRIGGER = table(
    {
        "type": {"const": "prometheus"},
        "metricType": {"enum": ["AverageValue", "Value"]},
        "metadata": table(
            {"serverAddress": TEXT, "query": TEXT, "threshold": TEXT}, {"activationThreshold": TEXT}
        ),
    }
)
ROUTE_RULE = table(
    {
        "matches": {
            **listing(
                table({"path": table({"type": {"enum": ["PathPrefix", "Exact"]}, "value": TEXT})})
            ),
            "maxItems": 64,
        },
        "backendRefs": listing(table({"name": NAME, "port": COUNT})),
    },
    {"timeouts": table({"request": DURATION, "backendRequest": DURATION})},
)

SCHEMAS = {
    "ServiceMonitor": thing(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        table({"selector": SELECTOR, "endpoints": ENDPOINTS}, {"sampleLimit": COUNT}),
    ),
    "PodMonitor": thing(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        table(
            {"selector": SELECTOR, "podMetricsEndpoints": ENDPOINTS},
            {"sampleLimit": COUNT, "podTargetLabels": listing(TEXT)},
        ),
    ),
    "PrometheusRule": thing(
        "monitoring.coreos.com/v1", "PrometheusRule", table({"groups": listing(GROUP)})
    ),
    "ScaledObject": thing(
        "keda.sh/v1alpha1",
        "ScaledObject",
        table(
            {
                "scaleTargetRef": table({"apiVersion": TEXT, "kind": TEXT, "name": NAME}),
                "minReplicaCount": COUNT,
                "maxReplicaCount": COUNT,
                "triggers": listing(TRIGGER),
            },
            {
                "pollingInterval": COUNT,
                "cooldownPeriod": COUNT,
                "fallback": table(
                    {"failureThreshold": COUNT, "replicas": COUNT},
                    {
                        "behavior": {
                            "enum": [
                                "static",
                                "currentReplicas",
                                "currentReplicasIfHigher",
                                "currentReplicasIfLower",
                            ]
                        }
                    },
                ),
                "advanced": table({"horizontalPodAutoscalerConfig": table({"behavior": BEHAVIOR})}),
            },
        ),
    ),
    "HTTPRoute": thing(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        table(
            {
                "parentRefs": listing(
                    table({"name": NAME}, {"namespace": NAME, "sectionName": NAME})
                ),
                "rules": {**listing(ROUTE_RULE), "maxItems": 16},
            },
            {"hostnames": listing(TEXT)},
        ),
    ),
}
