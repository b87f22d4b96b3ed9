package deviceclaims

import (
	"cmp"
	"context"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
)

// What the scheduler decides about devices is in its log at the default verbosity: one line for each claim, with the claim, its devices,
// the node and why. What others decide, such as kube-controller-manager, is not.
const (
	// allocatedLine: devices were chosen for a claim.
	allocatedLine = "Allocated devices"
	// sharedLine: a pod uses what a claim had already.
	sharedLine = "Reserved an allocated claim"
	// givenBackLine: what was allocated for a pod was taken back, or did not come.
	givenBackLine = "Gave devices back"
	// leftLine: the pod does not use the claim, and the claim keeps its devices.
	leftLine = "Gave a reservation back"
	// keptLine: what would have been taken back was not.
	keptLine = "Kept devices"
	// evictedLine: a pod is gone that was evicted for others.
	evictedLine = "Evicted pod is gone"
)

// logDecision writes the line about one claim. Without a node it is that of the allocation.
func logDecision(
	ctx context.Context, line string, pod *v1.Pod, node string,
	claim *resourceapi.ResourceClaim, allocation *resourceapi.AllocationResult, why string,
) {
	if node == "" && allocation != nil && allocation.NodeSelector != nil {
		node = strings.Join(sets.List(nodesByName(allocation.NodeSelector)), ",")
	}
	name := klog.KRef(claim.Namespace, cmp.Or(claim.Name, claim.GenerateName)) // one for extended resources is made later
	klog.FromContext(ctx).Info(line, "claim", name, "pod", klog.KObj(pod), "node", node, "devices", deviceNames(allocation), "why", why)
}

func deviceNames(allocation *resourceapi.AllocationResult) []string {
	if allocation == nil {
		return []string{} // logs show it as a list, too
	}
	names := make([]string, len(allocation.Devices.Results))
	for i, result := range allocation.Devices.Results {
		names[i] = result.Driver + "/" + result.Pool + "/" + result.Device
	}
	return names
}
