// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package rights

import (
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/kubernetes/pkg/features"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/profile"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
	"stowage.dev/stowage/pkg/plugins/numa"
	"stowage.dev/stowage/pkg/plugins/ownership"
)

// What grants rights in our manifests.
const (
	schedulerRole = "ClusterRole stowage-scheduler: kubectl apply -k manifests/base/access"
	ownershipRole = "ClusterRole stowage-scheduler-ownership: kubectl apply -k manifests/ownership"
	numaRole      = "ClusterRole stowage-scheduler-numa: kubectl apply -k manifests/numa"
	leaseRole     = "Role stowage-scheduler-leader-election: kubectl apply -k manifests/base/access, or overlays/second-profile " +
		"for kube-system"
)

// clusterRules are what manifests/base/access/scheduler.yaml grants.
var clusterRules = []rbacv1.PolicyRule{
	rule("", "pods", "get", "list", "watch", "delete"),
	rule("", "pods/binding", "create"),
	rule("", "pods/status", "patch"),
	rule("events.k8s.io", "events", "create", "patch"),
	rule("", "nodes,namespaces", "list", "watch"),
	rule("", "services,replicationcontrollers", "list", "watch"),
	rule("apps", "replicasets,statefulsets", "list", "watch"),
	rule("policy", "poddisruptionbudgets", "list", "watch"),
	rule(groupAPI, "podgroups", "list", "watch"),
	rule(groupAPI, "podgroups/status", "patch"),
	rule("", "persistentvolumeclaims,persistentvolumes", "list", "watch", "update"),
	rule("storage.k8s.io", "storageclasses,csinodes,csidrivers,csistoragecapacities,volumeattachments", "list", "watch"),
	rule("resource.k8s.io", "deviceclasses,resourceslices,devicetaintrules", "list", "watch"),
	rule("resource.k8s.io", "resourceclaims", "get", "list", "watch", "update", "create", "delete"),
	rule("resource.k8s.io", "resourceclaims/status", "update"),
	rule("resource.k8s.io", "resourceclaims/binding", "update"),
}

// numaRules are what manifests/numa/scheduler.yaml grants.
var numaRules = []rbacv1.PolicyRule{rule("topology.node.k8s.io", "noderesourcetopologies", "get", "list", "watch")}

// groupAPI has groups of pods, which only feature gate GenericWorkload looks at.
const groupAPI = "scheduling.k8s.io"

func rule(group, resources string, verbs ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: strings.Split(resources, ","), Verbs: verbs}
}

// Required are the rights that a scheduler with this configuration uses. Without DeviceClaims it is no matter of
// ours.
func Required(cfg *schedulerconfig.KubeSchedulerConfiguration, profiles profile.Map) []Right {
	if !enabledAnywhere(profiles, deviceclaims.Name) {
		return nil
	}
	var required []Right
	for _, rule := range clusterRules {
		for _, right := range rightsOf(rule, Right{Role: schedulerRole}) {
			if used(right) {
				required = append(required, right)
			}
		}
	}
	if enabledAnywhere(profiles, numa.Name) {
		for _, rule := range numaRules {
			required = append(required, rightsOf(rule, Right{Role: numaRole})...)
		}
	}
	for _, p := range cfg.Profiles {
		for _, entry := range p.PluginConfig {
			args, ok := entry.Args.(*config.DeviceClaimsArgs)
			if !ok || args.Ownership == nil || !ptr.Deref(args.Ownership.Enabled, false) {
				continue
			}
			name, err := ownership.RuleName(p.SchedulerName)
			if err != nil {
				continue // the plugin has refused it
			}
			required = append(required, rightsOf(rule("resource.k8s.io", "devicetaintrules", "create"), Right{Role: ownershipRole})...)
			required = append(required,
				rightsOf(rule("resource.k8s.io", "devicetaintrules", "update", "delete"), Right{Role: ownershipRole, Name: name})...)
		}
	}
	if lease := cfg.LeaderElection; lease.LeaderElect {
		there := Right{Role: leaseRole, Namespace: lease.ResourceNamespace}
		named := Right{Role: leaseRole, Namespace: lease.ResourceNamespace, Name: lease.ResourceName}
		required = append(required, rightsOf(rule("coordination.k8s.io", "leases", "create"), there)...)
		required = append(required, rightsOf(rule("coordination.k8s.io", "leases", "get", "update"), named)...)
		required = append(required, rightsOf(rule("", "events", "create"), there)...)
	}
	return required
}

// used tells whether a right is for something that the feature gates turn on.
func used(right Right) bool {
	switch {
	case right.Group == groupAPI:
		return utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload)
	case right.Resource == "devicetaintrules":
		return utilfeature.DefaultFeatureGate.Enabled(features.DRADeviceTaintRules)
	}
	return true
}

// rightsOf are the single rights of a rule, all like the given one otherwise.
func rightsOf(rule rbacv1.PolicyRule, like Right) []Right {
	var rights []Right
	for _, resource := range rule.Resources {
		for _, verb := range rule.Verbs {
			one := like
			one.Group, one.Resource, one.Verb = rule.APIGroups[0], resource, verb
			rights = append(rights, one)
		}
	}
	return rights
}

func enabledAnywhere(profiles profile.Map, name string) bool {
	for _, p := range profiles {
		if slices.ContainsFunc(p.ListPlugins().Filter.Enabled, func(p schedulerconfig.Plugin) bool { return p.Name == name }) {
			return true
		}
	}
	return false
}
