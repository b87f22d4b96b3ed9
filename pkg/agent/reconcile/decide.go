// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"stowage.dev/stowage/pkg/agent/ledger"
)

const (
	// Interval between two readings.
	Interval = time.Minute
	// settle is how long after a start of the kubelet nothing is concluded from what it lists: it lists no pods until it has got them.
	settle = time.Minute
)

// Reading is what is seen of one claim of the ledger at one time. An error in it means that its part is not known.
type Reading struct {
	At time.Time
	// Claim is the object of that name; nil if there is none.
	Claim    *resourceapi.ResourceClaim
	ClaimErr error
	// Pods of this node, by the API.
	Pods    []corev1.Pod
	PodsErr error
	// Kubelet is what its PodResources service lists.
	Kubelet    []KubeletPod
	KubeletErr error
	// Running are the pods of which a process was there before Pods were asked for.
	Running    map[types.UID]bool
	RunningErr error
	// Users are pods of this node that have not ended, by the UID of each claim that they refer to. Only
	// asked for about CDI files without a record.
	Users    map[types.UID]string
	UsersErr error
	// Registered is when the kubelet last registered the driver, which it does when it starts; zero if it has not.
	Registered time.Time
	// Processes on what the claim has of its GPUs. Those of a lost one are not known.
	Processes    int
	ProcessesErr error
}

// KubeletPod is a pod that the kubelet gives resources to. Ordinary init containers are not listed.
type KubeletPod struct {
	Namespace, Name string
	// Claims that its containers have, by name.
	Claims []string
	// CDIClaims are the UIDs in the names of our CDI devices that they have.
	CDIClaims []types.UID
	// Devices that they have from device plugins, anybody's.
	Devices []ledger.PluginDevice
}

// decide tells whether the claim is a leftover: it is certain that nobody uses its devices, as inUse tells of a reading.
// Otherwise keep says why it stays. It takes two readings, with at least Interval between them; missing evidence is no evidence,
// so whatever is not known keeps the claim.
func decide(first, second *Reading, inUse func(*Reading) string) (leftover bool, keep string) {
	if keep := inUse(second); keep != "" {
		return false, keep
	}
	if first == nil || second.At.Sub(first.At) < Interval {
		return false, LookedOnce
	}
	if keep := inUse(first); keep != "" {
		return false, keep
	}
	if second.Registered.After(first.At.Add(-settle)) {
		return false, StartedRecently
	}
	return true, ""
}

// inUse says who uses the claim, or what is not known; it is empty if nobody does.
func inUse(entry *ledger.Entry, r *Reading) string {
	// 1. The claim itself.
	switch {
	case r.ClaimErr != nil:
		return fmt.Sprintf("the API server does not tell about the claim: %v", r.ClaimErr)
	case isAllocated(entry, r):
		return "the claim is allocated"
	}
	// 2. Pods of this node, whether or not the claim is reserved for them.
	if r.PodsErr != nil {
		return fmt.Sprintf("the API server does not tell about this node's pods: %v", r.PodsErr)
	}
	for i := range r.Pods {
		pod := &r.Pods[i]
		if !terminal(pod) && hadIt(entry, r, pod) {
			return fmt.Sprintf("pod %s/%s uses it and has not ended", pod.Namespace, pod.Name)
		}
	}
	// 3. What the kubelet runs, once it knows its pods.
	if keep := kubeletUnknown(r); keep != "" {
		return keep
	}
	for _, pod := range r.Kubelet {
		named := pod.Namespace == entry.Claim.Namespace && slices.Contains(pod.Claims, entry.Claim.Name)
		// The kubelet lists a claim before it is prepared, and then none of its devices.
		next := replaced(entry, r) && (slices.Contains(pod.CDIClaims, r.Claim.UID) || reservedFor(entry, r, pod))
		if named && !next || slices.Contains(pod.CDIClaims, entry.Claim.UID) || slices.Contains(pod.Devices, entry.Claim.Plugin) {
			return fmt.Sprintf("the kubelet has it for pod %s/%s", pod.Namespace, pod.Name)
		}
	}
	// 4. What runs although nobody lists it.
	if keep := unlisted(r, func(pod *corev1.Pod) bool { return hadIt(entry, r, pod) }); keep != "" {
		return keep
	}
	// 5. The GPUs.
	return processes(r)
}

// hadIt tells whether the claim may have been prepared for the pod. Where another claim has the name by now, a pod that
// this one is reserved for means this one.
func hadIt(entry *ledger.Entry, r *Reading, pod *corev1.Pod) bool {
	if slices.Contains(entry.Pods, pod.UID) {
		return true
	}
	next := replaced(entry, r) && slices.ContainsFunc(r.Claim.Status.ReservedFor, func(c resourceapi.ResourceClaimConsumerReference) bool {
		return c.UID == pod.UID
	})
	return uses(pod, entry.Claim) && !next
}

// replaced tells whether another claim has the name, or the claim itself other devices: an allocation goes only when nobody has the claim
// reserved any more, so who has now is not who used what was prepared.
func replaced(entry *ledger.Entry, r *Reading) bool {
	return r.Claim != nil && (r.Claim.UID != entry.Claim.UID || r.Claim.Status.Allocation != nil && !isAllocated(entry, r))
}

// reservedFor tells whether the claim that there is now is reserved for a pod of its namespace of that
// name, and the one that was prepared was not.
func reservedFor(entry *ledger.Entry, r *Reading, pod KubeletPod) bool {
	return slices.ContainsFunc(r.Claim.Status.ReservedFor, func(c resourceapi.ResourceClaimConsumerReference) bool {
		return c.Name == pod.Name && !slices.Contains(entry.Pods, c.UID)
	})
}

// unlisted says which pod has processes although it has ended or is gone, by the lists. One that is deleted by force is in neither list
// from then on, and its containers have the rest of its grace period. Without the pod it is not known which claims it had.
func unlisted(r *Reading, hadIt func(*corev1.Pod) bool) string {
	if r.RunningErr != nil {
		return fmt.Sprintf("it is not known which pods have processes: %v", r.RunningErr)
	}
	for _, uid := range slices.Sorted(maps.Keys(r.Running)) {
		i := slices.IndexFunc(r.Pods, func(pod corev1.Pod) bool {
			return pod.UID == uid || pod.Annotations[corev1.MirrorPodAnnotationKey] == string(uid)
		})
		switch {
		case !strings.Contains(string(uid), "-"): // of no pod, or of a static one, which cannot have claims
		case i < 0:
			return fmt.Sprintf("processes of pod %s run, which the API server does not have any more", uid)
		case terminal(&r.Pods[i]) && hadIt(&r.Pods[i]):
			return fmt.Sprintf("processes of pod %s/%s run, although it has ended", r.Pods[i].Namespace, r.Pods[i].Name)
		}
	}
	return ""
}

// fileInUse is inUse for a CDI file that no record of the ledger owns. Nothing but the claim's UID is known of its claim.
func fileInUse(claim types.UID, r *Reading) string {
	switch {
	case r.PodsErr != nil:
		return fmt.Sprintf("the API server does not tell about this node's pods: %v", r.PodsErr)
	case r.UsersErr != nil:
		return fmt.Sprintf("the API server does not tell about the claims of this node's pods: %v", r.UsersErr)
	case r.Users[claim] != "":
		return fmt.Sprintf("pod %s uses it and has not ended", r.Users[claim])
	}
	if keep := kubeletUnknown(r); keep != "" {
		return keep
	}
	for _, pod := range r.Kubelet {
		if slices.Contains(pod.CDIClaims, claim) {
			return fmt.Sprintf("the kubelet has it for pod %s/%s", pod.Namespace, pod.Name)
		}
	}
	if keep := unlisted(r, func(*corev1.Pod) bool { return true }); keep != "" {
		return keep
	}
	return processes(r)
}

// kubeletUnknown says why it is not known what the kubelet runs; it is empty if it is.
func kubeletUnknown(r *Reading) string {
	switch {
	case r.KubeletErr != nil:
		return fmt.Sprintf("the kubelet does not tell what it runs: %v", r.KubeletErr)
	case r.Registered.IsZero():
		return "the kubelet has not registered the driver"
	}
	for i := range r.Pods {
		if pod := &r.Pods[i]; pod.Status.Phase == corev1.PodRunning && !listed(pod, r.Kubelet) {
			return fmt.Sprintf("the kubelet does not know its pods yet: %s/%s is missing", pod.Namespace, pod.Name)
		}
	}
	return ""
}

func processes(r *Reading) string {
	switch {
	case r.ProcessesErr != nil:
		return fmt.Sprintf("NVML does not tell about processes: %v", r.ProcessesErr)
	case r.Processes > 0:
		return fmt.Sprintf("%d processes are on its devices", r.Processes)
	}
	return ""
}

// isAllocated tells whether the claim still has the devices that were prepared for it: an allocation never changes, so one without some of
// them is another. One of the same name with another UID is another claim.
func isAllocated(entry *ledger.Entry, r *Reading) bool {
	if r.Claim == nil || r.Claim.UID != entry.Claim.UID || r.Claim.Status.Allocation == nil {
		return false
	}
	results := r.Claim.Status.Allocation.Devices.Results
	return !slices.ContainsFunc(entry.Devices, func(d ledger.Device) bool {
		return !slices.ContainsFunc(results, func(result resourceapi.DeviceRequestAllocationResult) bool {
			return d.Pool == result.Pool && d.Device == result.Device
		})
	})
}

func terminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// uses tells whether the pod refers to the claim in any of the ways that the API has.
func uses(pod *corev1.Pod, claim ledger.Claim) bool {
	return pod.Namespace == claim.Namespace && slices.Contains(claimsOf(pod), claim.Name)
}

// claimsOf are the names of the claims that the pod refers to. One that is not made yet was not prepared.
func claimsOf(pod *corev1.Pod) []string {
	var names []string
	for i := range pod.Spec.ResourceClaims {
		if name, _, _ := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i]); name != nil {
			names = append(names, *name)
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		names = append(names, extended.ResourceClaimName)
	}
	return names
}

func listed(pod *corev1.Pod, kubelet []KubeletPod) bool {
	return slices.ContainsFunc(kubelet, func(k KubeletPod) bool { return k.Namespace == pod.Namespace && k.Name == pod.Name })
}
