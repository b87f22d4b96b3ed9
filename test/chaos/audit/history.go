// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// Key names a namespaced object.
type Key = types.NamespacedName

// Change is one object after a change. Exactly one of Pod, Claim and Group is
// set; of a deleted object it is the last known state.
type Change struct {
	Pod     *v1.Pod
	Claim   *resourceapi.ResourceClaim
	Group   *schedulingapi.PodGroup
	Deleted bool
}

// Violation is a state that must never be.
type Violation struct {
	// Revision of etcd at which it began.
	Revision int64
	What     string
}

func (v Violation) String() string { return fmt.Sprintf("revision %d: %s", v.Revision, v.What) }

// Counts say how much happened.
type Counts struct {
	// Claims is how many there were.
	Claims int
	// Bound is how many pods got a node.
	Bound int
	// Conflicts is how often an allocation was written that did not fit beside those written before.
	Conflicts int
	// RolledBack is how often an allocation was taken back while a pod still waited for it.
	RolledBack int
	// Retries is how often a claim was allocated again.
	Retries int
	// LongestWait is the longest time from a pod's creation until it got a node, and Slowest that pod.
	LongestWait time.Duration
	Slowest     Key
	// Violations is how many were returned.
	Violations int
}

// History is the state of all pods and claims at one revision.
type History struct {
	inventory  *Inventory
	pods       map[Key]*v1.Pod
	seen       map[types.UID]time.Time // when a pod was first seen; for ever
	claims     map[Key]*claim
	goneGroups sets.Set[Key]
	violations map[string]bool // those of the state now
	counts     Counts
}

// claim is a claim with what is remembered of it.
type claim struct {
	object    *resourceapi.ResourceClaim
	allocated int // how often
}

// NewHistory begins with no pods and no claims.
func NewHistory(inventory *Inventory) *History {
	return &History{
		inventory: inventory, pods: map[Key]*v1.Pod{}, seen: map[types.UID]time.Time{}, claims: map[Key]*claim{},
		goneGroups: sets.New[Key](), violations: map[string]bool{},
	}
}

// Counts are those until now.
func (h *History) Counts() Counts { return h.counts }

// Pods and Claims are what exists now. Read only, until the next Apply.
func (h *History) Pods() map[Key]*v1.Pod { return h.pods }

// Claims are the claims that exist now.
func (h *History) Claims() []*resourceapi.ResourceClaim {
	var all []*resourceapi.ResourceClaim
	for _, key := range slices.SortedFunc(maps.Keys(h.claims), compareKeys) {
		all = append(all, h.claims[key].object)
	}
	return all
}

// Apply takes in everything that changed at one revision, and returns the
// violations that began with it. now is when it happened.
func (h *History) Apply(revision int64, now time.Time, changes ...Change) []Violation {
	for _, change := range changes {
		switch {
		case change.Pod != nil:
			h.applyPod(change.Pod, change.Deleted, now)
		case change.Claim != nil:
			h.applyClaim(change.Claim, change.Deleted)
		case change.Group != nil:
			if key := (Key{Namespace: change.Group.Namespace, Name: change.Group.Name}); change.Deleted {
				h.goneGroups.Insert(key)
			} else {
				h.goneGroups.Delete(key)
			}
		}
	}
	var began []Violation
	found := map[string]bool{}
	for _, what := range h.judge() {
		found[what] = true
		if !h.violations[what] {
			began = append(began, Violation{Revision: revision, What: what})
		}
	}
	h.violations = found
	h.counts.Violations += len(began)
	return began
}

func (h *History) applyPod(pod *v1.Pod, deleted bool, now time.Time) {
	key := Key{Namespace: pod.Namespace, Name: pod.Name}
	old := h.pods[key]
	if deleted {
		delete(h.pods, key)
		return
	}
	h.pods[key] = pod
	if _, ok := h.seen[pod.UID]; !ok {
		h.seen[pod.UID] = now
	}
	if pod.Spec.NodeName != "" && (old == nil || old.Spec.NodeName == "") {
		h.counts.Bound++
		if wait := now.Sub(h.seen[pod.UID]); wait > h.counts.LongestWait {
			h.counts.LongestWait, h.counts.Slowest = wait, key
		}
	}
}

func (h *History) applyClaim(object *resourceapi.ResourceClaim, deleted bool) {
	key := Key{Namespace: object.Namespace, Name: object.Name}
	c := h.claims[key]
	if c != nil && c.object.UID != object.UID {
		c = nil // deleted and made again at one revision
	}
	if deleted {
		delete(h.claims, key)
		return
	}
	if c == nil {
		c = &claim{object: object}
		h.counts.Claims++
		h.claims[key] = c
		if object.Status.Allocation != nil {
			h.allocated(c)
		}
		return
	}
	was, is := c.object.Status.Allocation != nil, object.Status.Allocation != nil
	c.object = object
	switch {
	case !was && is:
		h.allocated(c)
	case was && !is && h.wanted(object):
		h.counts.RolledBack++
	}
}

// allocated counts what a new allocation means.
func (h *History) allocated(c *claim) {
	c.allocated++
	if c.allocated > 1 {
		h.counts.Retries++
	}
	var before []Holder
	for _, other := range h.claims {
		if other != c && other.object.Status.Allocation != nil {
			before = append(before, holderOf(other.object))
		}
	}
	if len(h.inventory.Overuse(append(before, holderOf(c.object)))) > len(h.inventory.Overuse(before)) {
		h.counts.Conflicts++
	}
}

// wanted tells whether a pod waits for the claim.
func (h *History) wanted(object *resourceapi.ResourceClaim) bool {
	for _, pod := range h.pods {
		if pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && slices.Contains(claimNames(pod), object.Name) &&
			pod.Namespace == object.Namespace {
			return true
		}
	}
	return false
}

// judge returns what is wrong with the state now, in order. Pods whose group is gone may have lost their claims: kube-controller-manager
// may let a group go while its pods are being bound, and then takes back what was reserved for it.
func (h *History) judge() []string {
	var wrong []string
	used := map[Key]*resourceapi.ResourceClaim{}
	for key, pod := range h.pods {
		if !IsBound(pod) {
			continue
		}
		group := pod.Spec.SchedulingGroup
		groupGone := group != nil && group.PodGroupName != nil && h.goneGroups.Has(Key{Namespace: pod.Namespace, Name: *group.PodGroupName})
		for _, name := range claimNames(pod) {
			claimKey := Key{Namespace: pod.Namespace, Name: name}
			c := h.claims[claimKey]
			switch {
			case groupGone && (c == nil || c.object.Status.Allocation == nil):
				continue
			case c == nil:
				wrong = append(wrong, fmt.Sprintf("pod %s is bound and its claim %s does not exist", key, name))
				continue
			case c.object.Status.Allocation == nil:
				wrong = append(wrong, fmt.Sprintf("pod %s is bound and its claim %s has no devices", key, name))
				continue
			case !groupGone && !resourceclaim.IsReservedForPod(pod, c.object, true):
				wrong = append(wrong, fmt.Sprintf("pod %s is bound and its claim %s is not reserved for it", key, name))
			case !reaches(c.object.Status.Allocation.NodeSelector, pod.Spec.NodeName):
				wrong = append(wrong, fmt.Sprintf("pod %s is bound to node %s, which the devices of its claim %s are not for", key,
					pod.Spec.NodeName, name))
			}
			used[claimKey] = c.object
		}
	}
	var holders []Holder
	for _, object := range used {
		holders = append(holders, holderOf(object))
	}
	for _, over := range h.inventory.Overuse(holders) {
		wrong = append(wrong, over.String())
	}
	slices.Sort(wrong)
	return wrong
}

// reaches tells whether devices with the selector are for a node. Only selectors
// by the node's name are known here.
func reaches(selector *v1.NodeSelector, node string) bool {
	if selector == nil {
		return true // for all nodes
	}
	compiled, err := nodeaffinity.NewNodeSelector(selector)
	return err == nil && compiled.Match(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}})
}

// IsBound tells whether a pod has a node and may still run: from the binding
// until it has ended or is gone.
func IsBound(pod *v1.Pod) bool {
	return pod.Spec.NodeName != "" && pod.Status.Phase != v1.PodSucceeded && pod.Status.Phase != v1.PodFailed
}

// claimNames are the claims that a pod uses and that have been made.
func claimNames(pod *v1.Pod) []string {
	var names []string
	for i := range pod.Spec.ResourceClaims {
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err == nil && name != nil {
			names = append(names, *name)
		}
	}
	return names
}

func holderOf(object *resourceapi.ResourceClaim) Holder {
	h := Holder{Name: object.Namespace + "/" + object.Name}
	if object.Status.Allocation != nil {
		h.Results = object.Status.Allocation.Devices.Results
	}
	return h
}

func compareKeys(a, b Key) int { return strings.Compare(a.String(), b.String()) }
