// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/snapshot"
)

// MaxNodes bounds how many nodes are added at once.
const MaxNodes = 10_000

// Change is a copy of a cluster's objects on which changes are tried. The objects of the original stay as they are.
type Change struct {
	snapshot.Objects
	// Evicted are the pods that lost their place, as namespace/name, and Added the names of the nodes that came.
	Evicted, Added []string
	// Lost are those of the evicted that no controller makes again.
	Lost []string
	// Kept are the pods that a drain leaves where they are, because a disruption budget refuses their eviction.
	Kept []Kept
	// disrupted counts the evictions that a budget has allowed, by namespace/name.
	disrupted map[string]int32
}

// Kept is a pod that is not evicted, as namespace/name, and why.
type Kept struct {
	Pod    string `json:"pod"`
	Reason string `json:"reason"`
}

// NewChange returns a copy without changes.
func NewChange(objects *snapshot.Objects) *Change {
	return &Change{Objects: objects.Clone(), disrupted: map[string]int32{}}
}

// Delete takes a pod away, with the claims that were made for it, and its reservations of others. A claim that nobody uses any more is
// free again. The error says that there is no such pod.
func (c *Change) Delete(namespace, name string) error {
	i := slices.IndexFunc(c.Pods, func(p *v1.Pod) bool { return p.Namespace == namespace && p.Name == name })
	if i < 0 {
		return fmt.Errorf("pod %s/%s: there is none", namespace, name)
	}
	pod := c.Pods[i]
	c.Pods = slices.Delete(c.Pods, i, i+1)
	c.release(pod)
	return nil
}

// release frees what a pod holds.
func (c *Change) release(pod *v1.Pod) {
	c.ResourceClaims = slices.DeleteFunc(c.ResourceClaims, func(claim *resourceapi.ResourceClaim) bool { return isMadeFor(claim, pod) })
	for i, claim := range c.ResourceClaims {
		uses := func(ref resourceapi.ResourceClaimConsumerReference) bool { return ref.UID == pod.UID }
		if claim.Namespace != pod.Namespace || !slices.ContainsFunc(claim.Status.ReservedFor, uses) {
			continue
		}
		claim = claim.DeepCopy()
		claim.Status.ReservedFor = slices.DeleteFunc(claim.Status.ReservedFor, uses)
		if len(claim.Status.ReservedFor) == 0 {
			claim.Status = resourceapi.ResourceClaimStatus{}
		}
		c.ResourceClaims[i] = claim
	}
}

func isMadeFor(claim *resourceapi.ResourceClaim, pod *v1.Pod) bool {
	owner := metav1.GetControllerOf(claim)
	return claim.Namespace == pod.Namespace && owner != nil && owner.UID == pod.UID
}

// Drain closes a node to new pods and takes its pods off, as kubectl drain --ignore-daemonsets does. Pods that have a controller come back
// without a node, and with new claims where theirs were made from templates; they are returned. Others are gone. A pod whose eviction a
// disruption budget refuses now stays: kubectl drain waits until the budget's pods are ready elsewhere.
func (c *Change) Drain(name string) ([]*v1.Pod, error) {
	i := slices.IndexFunc(c.Nodes, func(n *v1.Node) bool { return n.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("node %s: there is none", name)
	}
	node := c.Nodes[i].DeepCopy()
	node.Spec.Unschedulable = true
	c.Nodes[i] = node
	var back []*v1.Pod
	for _, pod := range slices.Clone(c.Pods) {
		owner := metav1.GetControllerOf(pod)
		if pod.Spec.NodeName != name || isOver(pod) || owner != nil && owner.Kind == "DaemonSet" ||
			pod.Annotations[v1.MirrorPodAnnotationKey] != "" {
			continue
		}
		if refusal := c.refuseEviction(pod); refusal != "" {
			c.Kept = append(c.Kept, Kept{snapshot.Reference(pod), refusal})
			continue
		}
		if err := c.Delete(pod.Namespace, pod.Name); err != nil {
			return nil, err
		}
		c.Evicted = append(c.Evicted, snapshot.Reference(pod))
		deleted := pod.DeletionTimestamp != nil
		if owner == nil && !deleted {
			c.Lost = append(c.Lost, snapshot.Reference(pod))
		}
		if owner == nil || owner.Kind == "ReplicaSet" && deleted { // which has made another one already
			continue
		}
		again := &v1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, Labels: pod.Labels,
			OwnerReferences: pod.OwnerReferences,
		}, Spec: *pod.Spec.DeepCopy()}
		again.Spec.NodeName = ""
		if err := c.AddPod(again); err != nil {
			return nil, err
		}
		back = append(back, again)
	}
	return back, nil
}

// AddPod adds a pod that waits, and makes its claims from their templates as kube-controller-manager does. The error names the
// object that is missing, or is there already.
func (c *Change) AddPod(pod *v1.Pod) error {
	if slices.ContainsFunc(c.Pods, func(p *v1.Pod) bool { return p.Namespace == pod.Namespace && p.Name == pod.Name }) {
		return fmt.Errorf("pod %s: there is one of that name in the cluster", snapshot.Reference(pod))
	}
	identify(pod, "Pod")
	pod.Spec.NodeName, pod.Status = "", v1.PodStatus{Phase: v1.PodPending}
	if err := c.prioritize(pod); err != nil {
		return err
	}
	for _, ref := range pod.Spec.ResourceClaims {
		if ref.ResourceClaimTemplateName == nil {
			continue
		}
		i := slices.IndexFunc(c.ResourceClaimTemplates, func(t *resourceapi.ResourceClaimTemplate) bool {
			return t.Namespace == pod.Namespace && t.Name == *ref.ResourceClaimTemplateName
		})
		if i < 0 {
			return fmt.Errorf("pod %s: spec.resourceClaims %s: there is no ResourceClaimTemplate %s/%s",
				snapshot.Reference(pod), ref.Name, pod.Namespace, *ref.ResourceClaimTemplateName)
		}
		template := c.ResourceClaimTemplates[i]
		claim := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: pod.Namespace, Name: c.freeClaimName(pod.Namespace, pod.Name+"-"+ref.Name), Labels: template.Spec.Labels,
				Annotations: map[string]string{resourceapi.PodResourceClaimAnnotation: ref.Name},
				OwnerReferences: []metav1.OwnerReference{{
					APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true),
				}},
			},
			Spec: *template.Spec.Spec.DeepCopy(),
		}
		if err := c.AddClaim(claim); err != nil {
			return err
		}
		pod.Status.ResourceClaimStatuses = append(pod.Status.ResourceClaimStatuses, v1.PodResourceClaimStatus{
			Name:              ref.Name,
			ResourceClaimName: &claim.Name,
		})
	}
	c.Pods = append(c.Pods, pod)
	return nil
}

// freeClaimName is a name that no claim of the namespace has: kube-controller-manager adds a random end.
func (c *Change) freeClaimName(namespace, name string) string {
	taken := map[string]bool{}
	for _, claim := range c.ResourceClaims {
		if claim.Namespace == namespace && strings.HasPrefix(claim.Name, name) {
			taken[claim.Name] = true
		}
	}
	free := name
	for i := 1; taken[free]; i++ {
		free = fmt.Sprintf("%s-%d", name, i)
	}
	return free
}

// AddClaim adds a claim without an allocation. The error says that there is one of its name.
func (c *Change) AddClaim(claim *resourceapi.ResourceClaim) error {
	if slices.ContainsFunc(c.ResourceClaims, func(o *resourceapi.ResourceClaim) bool {
		return o.Namespace == claim.Namespace && o.Name == claim.Name
	}) {
		return fmt.Errorf("claim %s: there is one of that name in the cluster", snapshot.Reference(claim))
	}
	identify(claim, "ResourceClaim")
	claim.Status = resourceapi.ResourceClaimStatus{}
	c.ResourceClaims = append(c.ResourceClaims, claim)
	return nil
}

// identify gives an object what the API server would, the same each time.
func identify(object metav1.Object, kind string) {
	object.SetUID(types.UID("simulated:" + kind + ":" + object.GetNamespace() + "/" + object.GetName()))
	object.SetResourceVersion("1")
}

// prioritize sets the pod's priority from its class, as the admission plugin Priority does.
func (c *Change) prioritize(pod *v1.Pod) error {
	if pod.Spec.Priority != nil {
		return nil
	}
	pod.Spec.Priority = new(int32)
	for _, class := range c.PriorityClasses {
		if class.Name == pod.Spec.PriorityClassName || pod.Spec.PriorityClassName == "" && class.GlobalDefault {
			pod.Spec.Priority = ptr.To(class.Value)
			if pod.Spec.PreemptionPolicy == nil {
				pod.Spec.PreemptionPolicy = class.PreemptionPolicy
			}
			return nil
		}
	}
	if name := pod.Spec.PriorityClassName; name != "" {
		return fmt.Errorf("pod %s: spec.priorityClassName: there is no PriorityClass %s", snapshot.Reference(pod), name)
	}
	return nil
}

// AddNodes adds n empty nodes like one that is there: profile is its name, or an instance type that it has. Their devices are copies of its
// own, without the driver's taints. Devices that it shares with other nodes are not copied.
func (c *Change) AddNodes(profile string, n int) error {
	if n < 1 || n > MaxNodes {
		return fmt.Errorf("node profile %s: Invalid value: %d: want 1 to %d nodes", profile, n, MaxNodes)
	}
	i := slices.IndexFunc(c.Nodes, func(node *v1.Node) bool { return node.Name == profile })
	if i < 0 {
		i = slices.IndexFunc(c.Nodes, func(node *v1.Node) bool { return node.Labels[v1.LabelInstanceTypeStable] == profile })
	}
	if i < 0 {
		return fmt.Errorf("node profile %s: neither a node nor an instance type of one has that name", profile)
	}
	model := c.Nodes[i]
	original := slices.Clone(c.ResourceSlices)
	first := 0 // it may have been called for the profile before
	for slices.Contains(c.Added, fmt.Sprintf("added-%s-%d", profile, first)) {
		first++
	}
	for k := first; k < first+n; k++ {
		name := fmt.Sprintf("added-%s-%d", profile, k)
		rename := func(s string) string { return strings.Replace(s, model.Name, name, 1) }
		node := model.DeepCopy()
		node.Name, node.Spec.Unschedulable = name, false
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(t v1.Taint) bool {
			return strings.HasPrefix(t.Key,
				"node.kubernetes.io/")
		})
		identify(node, "Node")
		if node.Labels != nil {
			node.Labels[v1.LabelHostname] = name
		}
		c.Nodes, c.Added = append(c.Nodes, node), append(c.Added, name)
		for _, slice := range original {
			if ptr.Deref(slice.Spec.NodeName, "") != model.Name {
				continue
			}
			slice = slice.DeepCopy()
			slice.Name = fmt.Sprintf("%s-%d", slice.Name, k)
			identify(slice, "ResourceSlice")
			slice.Spec.NodeName, slice.Spec.Pool.Name = &name, rename(slice.Spec.Pool.Name)
			if !strings.Contains(slice.Spec.Pool.Name, name) {
				slice.Spec.Pool.Name += "-" + name
			}
			for d := range slice.Spec.Devices {
				slice.Spec.Devices[d].Taints = nil
			}
			c.ResourceSlices = append(c.ResourceSlices, slice)
		}
	}
	return nil
}

// SetPriority gives pods of the cluster another priority. The pods themselves are replaced in the list, and those of the original stay.
func (c *Change) SetPriority(pods []*v1.Pod, priority int32) {
	for i, pod := range pods {
		changed := pod.DeepCopy()
		changed.Spec.Priority = &priority
		if at := slices.Index(c.Pods, pod); at >= 0 {
			c.Pods[at] = changed
		}
		pods[i] = changed
	}
}
