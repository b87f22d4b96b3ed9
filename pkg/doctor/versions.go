// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/snapshot"
)

// Versions of Kubernetes: the first one with resource.k8s.io/v1, and the one that Stowage is built and tested for (docs/prerequisites.md).
var (
	oldest  = version.MustParseGeneric("1.34.0")
	wanted  = version.MustParseGeneric("1.37.0")
	maxSkew = uint(3) // of a kubelet, see Kubernetes' version skew policy
)

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func (c *cluster) versions() {
	upgrade := "Upgrade it: docs/prerequisites.md says what Stowage needs."
	server, err := version.ParseGeneric(c.s.ServerVersion)
	switch {
	case err != nil:
		server = nil // one in memory, or one that hides it
	case server.LessThan(oldest):
		c.find(Error, "API server", upgrade, "It is %s, which has no resource.k8s.io/v1", c.s.ServerVersion)
	case server.LessThan(wanted) && c.installed():
		c.find(Warning, "API server", upgrade, "It is %s: Stowage is built and tested for 1.37", c.s.ServerVersion)
	}
	by := map[string][]string{}
	for _, name := range nodesWithDevices(c.s, "") {
		if node := c.nodes[name]; node != nil {
			by[node.Status.NodeInfo.KubeletVersion] = append(by[node.Status.NodeInfo.KubeletVersion], name)
		}
	}
	for _, text := range sortedKeys(by) {
		kubelet, err := version.ParseGeneric(text)
		if err != nil {
			continue
		}
		nodes := "nodes " + some(by[text])
		switch {
		case kubelet.LessThan(oldest):
			c.find(Error, nodes, upgrade, "Their kubelets are %s, and prepare no claims of resource.k8s.io/v1", text)
		case server != nil && server.Minor() < kubelet.Minor():
			c.find(Error, nodes, "Upgrade the API server first: Kubernetes does not support newer kubelets.",
				"Their kubelets are %s, and the API server is %s", text, c.s.ServerVersion)
		case server != nil && kubelet.Minor()+maxSkew < server.Minor():
			c.find(Warning, nodes, "Upgrade the kubelets: Kubernetes supports three minor versions.",
				"Their kubelets are %s, and the API server is %s", text, c.s.ServerVersion)
		}
	}
	tags := map[string]string{}
	for _, s := range c.schedulers {
		if s.ours {
			tags[s.String()] = tagOf(&s.Spec.Template)
		}
	}
	for _, agent := range c.agents {
		tags[daemonSetName(agent)] = tagOf(&agent.Spec.Template)
	}
	names := sortedKeys(tags)
	for i := 1; i < len(names); i++ {
		first, other := tags[names[0]], tags[names[i]]
		if first != other && !strings.Contains(first, "sha256:") && !strings.Contains(other, "sha256:") {
			c.find(Warning, names[i], "Apply the manifests of one version: scheduler and agents are released, and tested, together.",
				"Its image has the tag %q, and that of %s has %q", other, names[0], first)
		}
	}
}

// nodesWithDevices are those of which a slice has devices, of one driver if it is not empty.
func nodesWithDevices(s *snapshot.Snapshot, of string) []string {
	names := map[string]bool{}
	for _, slice := range s.ResourceSlices {
		if slice.Spec.NodeName != nil && len(slice.Spec.Devices) > 0 && (of == "" || slice.Spec.Driver == of) {
			names[*slice.Spec.NodeName] = true
		}
	}
	return sortedKeys(names)
}

func (c *cluster) apis() {
	if !slices.Contains(c.in.ResourceVersions, "v1") {
		c.find(Error, "API server", "Upgrade to Kubernetes 1.34 or later, and leave --runtime-config of resource.k8s.io out.",
			"It serves %q of resource.k8s.io, and not v1", c.in.ResourceVersions)
	}
}

// gate is a feature gate, and what does not work where it is off.
type gate struct {
	name, lost string
	severity   Severity
	// used tells whether the cluster has something that needs it.
	used func(*cluster) bool
}

func always(*cluster) bool { return true }

// extendedResources tells whether a class offers its devices as an extended resource.
func extendedResources(c *cluster) bool {
	return slices.ContainsFunc(c.s.DeviceClasses,
		func(class *resourceapi.DeviceClass) bool { return ptr.Deref(class.Spec.ExtendedResourceName, "") != "" })
}

// anyDevice makes a condition about published devices.
func anyDevice(is func(*resourceapi.Device) bool) func(*cluster) bool {
	return func(c *cluster) bool {
		for _, d := range c.devices {
			if d.Object != nil && is(d.Object) {
				return true
			}
		}
		return false
	}
}

// apiGates are gates of the API server: it drops the fields of those that are off, so that used cannot look for these alone.
var apiGates = []gate{
	{"DynamicResourceAllocation", "there are no claims", Error, always},
	{"DRAResourceClaimDeviceStatus", "drivers cannot say whether a device is ready, and the scheduler and why do not know", Warning, always},
	{"DRADeviceTaints", "ill GPUs are given to pods", Warning, always},
	{"DRAExtendedResource", "pods that ask for nvidia.com/gpu get no claim", Warning, extendedResources},
	{
		"DRAPartitionableDevices", "partitions (MIG) of a GPU are given out beside the whole of it, or not at all", Warning,
		anyDevice(func(d *resourceapi.Device) bool {
			return len(d.ConsumesCounters) > 0 || d.Attributes["profile"].StringValue != nil
		}),
	},
	{"DRAConsumableCapacity", "shares of a GPU are not counted", Warning, anyDevice(func(d *resourceapi.Device) bool {
		return ptr.Deref(d.AllowMultipleAllocations, false)
	})},
	{"DRADeviceBindingConditions", "pods are bound before their device is attached", Warning, anyDevice(func(d *resourceapi.Device) bool {
		return len(d.BindingConditions) > 0
	})},
}

// kubeletGates are those without which claims are not prepared.
var kubeletGates = []gate{
	{"DynamicResourceAllocation", "its kubelet starts pods without their devices", Error, always},
	{"DRAExtendedResource", "containers that ask for nvidia.com/gpu get no device", Warning, extendedResources},
}

func (c *cluster) apiGates() {
	for _, g := range apiGates {
		if on, known := c.in.FeatureGates[g.name]; known && !on && g.used(c) {
			c.find(g.severity, "API server", "Set --feature-gates="+g.name+"=true on every API server.",
				"The feature gate %s is off: %s", g.name, g.lost)
		}
	}
}

func (c *cluster) kubeletGates() {
	for _, node := range sortedKeys(c.in.KubeletGates) {
		for _, g := range kubeletGates {
			if on, known := c.in.KubeletGates[node][g.name]; known && !on && g.used(c) {
				c.find(g.severity, "node "+node, "Set featureGates: {"+g.name+": true} in the configuration of its kubelet, and of those like it.",
					"The feature gate %s of the kubelet is off: %s", g.name, g.lost)
			}
		}
	}
}

func (c *cluster) yourRights() {
	grant := "kubectl create clusterrolebinding stowage-readers --clusterrole=stowage-reader --user=YOU (manifests/kubectl/reader.yaml)"
	for _, missing := range c.s.Missing {
		if slices.Contains(readerResources, missing.Resource) {
			c.find(Warning, "you", grant, "You may not list %s: answers are as if there were none", missing.Resource)
		}
	}
	for _, right := range c.in.Denied {
		c.find(Warning, "you", grant, "You may not %s, which --watch needs", right)
	}
}

// readerResources are those of the ClusterRole stowage-reader without which other commands still answer.
var readerResources = []string{
	"namespaces", "persistentvolumeclaims", "persistentvolumes", "storageclasses.storage.k8s.io", "csinodes.storage.k8s.io",
	"poddisruptionbudgets.policy", "priorityclasses.scheduling.k8s.io", "podgroups.scheduling.k8s.io",
	"resourceclaimtemplates.resource.k8s.io", "devicetaintrules.resource.k8s.io",
}
