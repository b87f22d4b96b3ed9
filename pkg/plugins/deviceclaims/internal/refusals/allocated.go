// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package refusals

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/features"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
)

// Reasons why a node is refused besides those of the allocator. The scheduler counts equal strings over all
// nodes, so they say nothing about the node.
const (
	ReasonElsewhere = "node(s) other than those that a claim of the pod is allocated for"
	ReasonSkipping  = "node(s) that cannot skip node operations, as an allocated claim of the pod needs"
	ReasonBinding   = "node(s) refused because an allocated claim of the pod has devices that could not be made ready"
)

// WhyUnusable says why a claim cannot be used on the node as it is allocated, empty if it can or is not.
func (f *Finder) WhyUnusable(pc *podclaims.Claim, node *v1.Node) string {
	switch {
	case pc.Nodes != nil && !pc.Nodes.Match(node):
		return ReasonElsewhere
	case skipsNodeOperations(pc.Allocation()) && !slices.Contains(node.Status.DeclaredFeatures, string(features.DRAOptionalNodeOperations)):
		return ReasonSkipping
	case f.Binder.WhyBroken(pc.Claim) != "":
		return ReasonBinding
	}
	return ""
}

// skipsNodeOperations tells whether an allocation, if there is one, has a device for which node operations are to be skipped. A
// kubelet that does not know of that would wait for a driver that is not there (KEP-5945).
func skipsNodeOperations(allocation *resourceapi.AllocationResult) bool {
	return allocation != nil && slices.ContainsFunc(allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
		return len(result.SkipNodeOperations) > 0
	})
}

// whereAllocated says for which nodes the pod's claims are allocated already, if that rules out others. The scheduler does not say more of
// nodes that PreFilter leaves out than that this plugin did it. If it left out all, it has said this itself.
func (f *Finder) whereAllocated(c *cycle.State) string {
	if limit := c.PreFilterResult(); limit != nil && len(limit.NodeNames) == 0 {
		return ""
	}
	var texts []string
	for i := range c.Claims {
		if pc := &c.Claims[i]; pc.Nodes != nil {
			texts = append(texts, f.describePin(pc)+": the pod can run nowhere else")
		}
	}
	return podevents.Join(texts...)
}

// describePin says for which nodes a claim is allocated. One that is planned is so for another node each time: if the text named it, pod
// and group would be written with each attempt.
func (f *Finder) describePin(pc *podclaims.Claim) string {
	of := ""
	if pc.User.Resource == "podgroups" {
		of = fmt.Sprintf(" of pod group %s", pc.User.Name)
	}
	if pc.Shared != nil {
		return fmt.Sprintf("claim %s%s is planned for another pod of the group on one node", klog.KObj(pc.Claim), of)
	}
	names := podclaims.NodesByName(pc.Allocation().NodeSelector)
	if names == nil {
		return fmt.Sprintf("claim %s%s is allocated on nodes that its status.allocation.nodeSelector selects", klog.KObj(pc.Claim), of)
	}
	var nodes []string
	for _, name := range sets.List(names) {
		if f.nodeOf(name) == nil {
			name += " (which does not exist)"
		}
		nodes = append(nodes, name)
	}
	return fmt.Sprintf("claim %s%s is allocated on node %s", klog.KObj(pc.Claim), of, strings.Join(nodes, " or "))
}

// Nowhere says that claims are allocated for nodes that have none in common.
func (f *Finder) Nowhere(c *cycle.State) string {
	var pins []string
	for i := range c.Claims {
		if pc := &c.Claims[i]; pc.Nodes != nil && podclaims.NodesByName(pc.Allocation().NodeSelector) != nil {
			pins = append(pins, f.describePin(pc))
		}
	}
	return strings.Join(pins, ", ") + ": no node can use all of them"
}
