package integration

// use is what a role is for.
type use struct {
	role, verbs, resources string
	// code makes the call. For what kube-scheduler's own code does it is the list of what the scheduler is not ready without.
	code, call string
}

const (
	ofKubeScheduler = "pkg/plugins/rights/required.go"
	claimStatus     = "pkg/agent/driver/report.go"
)

// uses is all that the roles in the manifests are for; TestEachRightIsUsed compares it with them.
var uses = []use{
	{"stowage-node-agent", "list watch create update delete", "resourceslices", "pkg/agent/driver/publish.go", "resourceslice.StartController("},
	{"stowage-node-agent", "get", "nodes", "pkg/agent/driver/nodecondition.go", ".Nodes().Get("},
	{"stowage-node-agent", "patch", "nodes/status", "pkg/agent/driver/nodecondition.go", ".Nodes().ApplyStatus("},
	{"stowage-node-agent", "get", "resourceclaims", claimStatus, ".ResourceClaims(ref.Namespace).Get("},
	// To apply is to patch; the API server asks for update, too, as for a claim that it would make.
	{"stowage-node-agent", "update patch", "resourceclaims/status", claimStatus, ".ApplyStatus("},
	{"stowage-node-agent", "associated-node:update associated-node:patch", "resourceclaims/driver", claimStatus, ".ApplyStatus("},
	{"stowage-node-agent", "impersonate:associated-node", "nodes", "cmd/node-agent/run.go", "rest.ImpersonationConfig{"},
	{"stowage-node-agent", "impersonate-on:associated-node:list", "pods", "pkg/agent/reconcile/sources.go", ".Pods(metav1.NamespaceAll).List("},
	{"stowage-node-agent", "create patch", "events", claimStatus, "StartRecordingToSink("},
	{"stowage-node-agent", "create", "tokenreviews subjectaccessreviews", "cmd/node-agent/serve.go", "newReaders("},

	{"stowage-scheduler", "get", "pods", "pkg/plugins/deviceclaims/bound.go", ".Pods(pod.Namespace).Get("},
	{"stowage-scheduler", "list watch delete", "pods", ofKubeScheduler, `rule("", "pods", "get", "list", "watch", "delete")`},
	{"stowage-scheduler", "create", "pods/binding", ofKubeScheduler, `"pods/binding"`},
	{"stowage-scheduler", "patch", "pods/status", ofKubeScheduler, `"pods/status"`},
	{"stowage-scheduler", "create patch", "events", ofKubeScheduler, `rule("events.k8s.io", "events", `},
	{"stowage-scheduler", "list watch", "nodes namespaces", ofKubeScheduler, `"nodes,namespaces"`},
	{"stowage-scheduler", "list watch", "services replicationcontrollers", ofKubeScheduler, `"services,replicationcontrollers"`},
	{"stowage-scheduler", "list watch", "replicasets statefulsets", ofKubeScheduler, `"replicasets,statefulsets"`},
	{"stowage-scheduler", "list watch", "poddisruptionbudgets", ofKubeScheduler, `"poddisruptionbudgets"`},
	{"stowage-scheduler", "list watch", "podgroups", ofKubeScheduler, `"podgroups"`},
	{"stowage-scheduler", "patch", "podgroups/status", ofKubeScheduler, `"podgroups/status"`},
	{"stowage-scheduler", "list watch update", "persistentvolumeclaims persistentvolumes", ofKubeScheduler, `"persistentvolumeclaims,persistentvolumes"`},
	{"stowage-scheduler", "list watch", "storageclasses csinodes csidrivers csistoragecapacities volumeattachments", ofKubeScheduler, `"storageclasses,csinodes,csidrivers`},
	{"stowage-scheduler", "list watch", "deviceclasses resourceslices devicetaintrules", ofKubeScheduler, `"deviceclasses,resourceslices,devicetaintrules"`},
	{"stowage-scheduler", "list watch", "resourceclaims", ofKubeScheduler, `"resourceclaims"`},
	{"stowage-scheduler", "get", "resourceclaims", "pkg/plugins/deviceclaims/write.go", ".ResourceClaims(claim.Namespace).Get("},
	{"stowage-scheduler", "update", "resourceclaims", "pkg/plugins/deviceclaims/write.go", "client.Update(ctx, claim"},
	{"stowage-scheduler", "create", "resourceclaims", "pkg/plugins/deviceclaims/extendedclaim.go", ".ResourceClaims(claim.Namespace).Create("},
	{"stowage-scheduler", "delete", "resourceclaims", "pkg/plugins/deviceclaims/extendedclaim.go", "client.Delete(ctx, current.Name"},
	{"stowage-scheduler", "update", "resourceclaims/status resourceclaims/binding", "pkg/plugins/deviceclaims/write.go", "client.UpdateStatus(ctx, claim"},
	{"stowage-scheduler-ownership", "create", "devicetaintrules", "pkg/plugins/ownership/keeper.go", "rules.Create(ctx"},
	{"stowage-scheduler-ownership", "update", "devicetaintrules", "pkg/plugins/ownership/keeper.go", "rules.Update(ctx"},
	{"stowage-scheduler-ownership", "delete", "devicetaintrules", "pkg/plugins/ownership/keeper.go", "rules.Delete(ctx"},
	{"stowage-scheduler-numa", "get list watch", "noderesourcetopologies", ofKubeScheduler, `"noderesourcetopologies"`},
	{"stowage-scheduler-leader-election", "get create update", "leases", "manifests/scheduler-config/second-scheduler.yaml", "leaderElect: true"},
	{"stowage-scheduler-leader-election", "create patch", "events", "manifests/scheduler-config/second-scheduler.yaml", "leaderElect: true"},
	{"stowage-metrics-reader", "get", "/metrics /readyz", "cmd/node-agent/serve.go", "readers.check"},
}
