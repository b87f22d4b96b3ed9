// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

const testDriver = "gpu.example.com"

// tb is what a test and a rapid test have in common.
type tb interface {
	Helper()
	Fatalf(string, ...any)
	Errorf(string, ...any)
}

// cluster is the world around a room, with a scheduler that does what the test says.
type cluster struct {
	t        tb
	room     *Room[any, int32]
	store    *inventory.Store
	index    *usage.Index
	revision uint64
	now      time.Time
	nodes    []*v1.Node
	pods     map[types.UID]*v1.Pod
	claims   map[types.UID]*resourceapi.ResourceClaim // by pod
	outcomes map[string]int
	tainted  map[string]bool
	// left is how many places a claim has that all pods share, and that is all that they wait for; nil if there is none.
	left *int
	// evicts and evicted say whom a pod may have evicted, evictable where an attempt finds that it may; nil if nobody may.
	evicts    func(*v1.Pod) string
	evicted   func(*v1.Node, usage.View) func(usage.View) usage.View
	evictable []string
	// uncertain are the pods that need not be tried when they are woken.
	uncertain map[string]bool
	// deadline is when claims that all pods share are in another state without any event, and that is all that they wait for; zero if
	// there are none.
	deadline time.Time
	// nodeOf looks a node up faster than by looking through all.
	nodeOf func(name string) *v1.Node
}

func newCluster(t tb, options Options) *cluster {
	c := &cluster{
		t: t, store: inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()}), index: usage.NewIndex(),
		now: time.Unix(1e9, 0), pods: map[types.UID]*v1.Pod{}, claims: map[types.UID]*resourceapi.ResourceClaim{}, outcomes: map[string]int{},
		tainted: map[string]bool{},
	}
	options.OnOutcome = func(cause Cause, placed bool) { c.outcomes[fmt.Sprintf("%s %v", cause, placed)]++ }
	c.room = New[any, int32](options)
	c.store.SetClass(class("gpu", `device.driver == "`+testDriver+`"`))
	return c
}

func class(name, selector string) *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: selector}}},
	}}
}

// slice is the pool of a node with n devices, the first tainted ones of which have a taint.
func slice(node string, n, tainted int) *resourceapi.ResourceSlice {
	s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: resourceapi.ResourceSliceSpec{
		Driver: testDriver, NodeName: ptr.To(node), Pool: resourceapi.ResourcePool{Name: node, ResourceSliceCount: 1},
	}}
	for i := range n {
		d := resourceapi.Device{Name: fmt.Sprint(i)}
		if i < tainted {
			d.Taints = []resourceapi.DeviceTaint{{Key: "bad", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		}
		s.Spec.Devices = append(s.Spec.Devices, d)
	}
	return s
}

// giveOutInShares lets two claims have the device, of one namespace if it is apart.
func giveOutInShares(d *resourceapi.Device, apart bool) {
	d.AllowMultipleAllocations = ptr.To(true)
	d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("2")}}
	d.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"sharedByNamespace": {BoolValue: ptr.To(apart)}}
}

// takesShare puts the pod into a namespace, and lets its claim ask for half a device.
func (c *cluster) takesShare(pod *v1.Pod, namespace string) {
	claim := c.claims[pod.UID]
	pod.Namespace, claim.Namespace = namespace, namespace
	claim.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("1")}}
}

func (c *cluster) addNode(name string) {
	c.nodes = append(c.nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
}

func (c *cluster) node(name string) *v1.Node {
	if c.nodeOf != nil {
		return c.nodeOf(name)
	}
	if i := slices.IndexFunc(c.nodes, func(n *v1.Node) bool { return n.Name == name }); i >= 0 {
		return c.nodes[i]
	}
	return nil
}

// addPod makes a pod with one claim for n devices of a class.
func (c *cluster) addPod(name string, priority int32, className string, n int64) *v1.Pod {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)}, Spec: v1.PodSpec{Priority: &priority}}
	c.pods[pod.UID] = pod
	c.claims[pod.UID] = &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-claim")},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: className, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: n},
		}}}},
	}
	return pod
}

func claimNamesOf(pod *v1.Pod) []types.NamespacedName {
	return []types.NamespacedName{{Namespace: pod.Namespace, Name: pod.Name}}
}

func (c *cluster) look(pod *v1.Pod, inv *inventory.View) *Question {
	switch {
	case !c.deadline.IsZero() && c.now.Before(c.deadline):
		return &Question{Claims: "in time", ChangesAt: c.deadline}
	case !c.deadline.IsZero():
		return &Question{Claims: "too late"}
	case c.left != nil && *c.left == 0:
		return &Question{Err: errors.New("full"), Claims: "full"}
	case c.left != nil:
		return &Question{Places: map[types.UID]int{"shared": *c.left}, Claims: "there"}
	}
	claim := c.claims[pod.UID]
	name := claim.Spec.Devices.Requests[0].Exactly.DeviceClassName
	q := &Question{Uncertain: c.uncertain[pod.Name], Classes: map[string]*inventory.Class{name: inv.Class(name)}}
	if c.evicts != nil {
		q.Evicts = c.evicts(pod)
	}
	q.Requests, q.Err = allocator.Compile([]*resourceapi.ResourceClaim{claim}, inv, allocator.DefaultFeatures())
	return q
}

func (c *cluster) world() World[any, int32] {
	return World[any, int32]{
		Now:      func() time.Time { return c.now },
		State:    func() (*inventory.View, usage.View) { return c.store.View(), c.index.View() },
		Node:     c.node,
		Nodes:    func() []*v1.Node { return c.nodes },
		Pod:      func(pod *v1.Pod) *v1.Pod { return c.pods[pod.UID] },
		Suitable: func(*v1.Pod, any) func(*v1.Node) bool { return func(n *v1.Node) bool { return !c.tainted[n.Name] } },
		Evicted:  c.evictedOn,
		Look:     func(pod *v1.Pod, _ any, inv *inventory.View) *Question { return c.look(pod, inv) },
		Key:      func(pod *v1.Pod, _ any) int32 { return *pod.Spec.Priority },
		Before:   func(_ any, a, b int32) bool { return a > b },
	}
}

// pass returns the names of the pods that are woken, in order.
func (c *cluster) pass() []string {
	c.t.Helper()
	wakes, again := passOf(context.Background(), c.room, c.world())
	if !again.IsZero() && !again.After(c.now) {
		c.t.Errorf("the next pass is due %v ago: it would be made at once, for ever", c.now.Sub(again))
	}
	var names []string
	for _, wake := range wakes {
		names = append(names, wake.Pod.Name)
	}
	return names
}

// passOf makes a pass and collects the wakes.
func passOf(ctx context.Context, room *Room[any, int32], world World[any, int32]) (wakes []Wake[any], again time.Time) {
	again = room.Pass(ctx, world, func(wake Wake[any]) { wakes = append(wakes, wake) })
	return wakes, again
}

// attempt is one attempt to schedule a pod.
type attempt struct {
	c        *cluster
	pod      *v1.Pod
	question *Question
	inv      *inventory.View
	view     usage.View
	nodes    []*v1.Node
}

// begin does what PreFilter does.
func (c *cluster) begin(pod *v1.Pod) *attempt {
	c.room.Note(pod, claimNamesOf(pod), nil)
	a := &attempt{c: c, pod: pod, inv: c.store.View(), view: c.index.View(), nodes: slices.Clone(c.nodes)}
	a.question = c.look(pod, a.inv)
	c.room.Judged(pod.UID, a.question, Seen{Usage: c.revision, Inventory: a.inv.Generation()})
	return a
}

// allNodes are the names of the nodes.
func (c *cluster) allNodes(yield func(string) bool) {
	for _, node := range c.nodes {
		if !yield(node.Name) {
			return
		}
	}
}

// end does what Filter, PostFilter and Reserve do. On the nodes in others something else than devices is missing. It returns the node.
func (a *attempt) end(others map[string]bool) string {
	if a.question.Err != nil {
		a.c.room.NotRefused(a.pod.UID, a.c.now)
		return ""
	}
	var refused []string
	for _, node := range a.nodes {
		if others[node.Name] {
			continue
		}
		if !a.c.fits(a.question, node, a.inv, a.view) {
			refused = append(refused, node.Name)
			continue
		}
		result := allocator.Allocate(context.Background(), allocator.Input{Requests: a.question.Requests, Node: node, Inventory: a.inv, Usage: a.c.index.View()})
		if !result.Fits() {
			a.c.room.Failed(a.pod.UID, a.c.now)
			return ""
		}
		a.c.hold(a.c.claims[a.pod.UID], &result.Allocations[0])
		a.c.room.Placed(a.pod.UID)
		return node.Name
	}
	a.c.room.Refused(a.pod.UID, Refusal{Nodes: slices.Values(refused), Evictable: a.c.evictable}, a.c.now)
	return ""
}

// try does both.
func (c *cluster) try(pod *v1.Pod, others ...string) string {
	set := map[string]bool{}
	for _, name := range others {
		set[name] = true
	}
	return c.begin(pod).end(set)
}

func (c *cluster) fits(q *Question, node *v1.Node, inv *inventory.View, view usage.View) bool {
	return allocator.Check(context.Background(), allocator.Input{Requests: q.Requests, Node: node, Inventory: inv, Usage: view}).Fits()
}

func (c *cluster) hold(claim *resourceapi.ResourceClaim, allocation *resourceapi.AllocationResult) {
	c.revision++
	c.index.Set(usage.RefOf(claim), allocation, nil)
}

// release frees what a claim has and returns the event, to be delivered to the room.
func (c *cluster) release(claim *resourceapi.ResourceClaim) func() {
	c.revision++
	freed, revision := c.index.Set(usage.RefOf(claim), nil, nil), c.revision
	return func() { c.room.Freed(freed, revision) }
}

// holdOn has some claim hold a device.
func (c *cluster) holdOn(node, device string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: node + device, UID: types.UID("holder-" + node + "-" + device)}}
	c.hold(claim, &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
		{Request: "r", Driver: testDriver, Pool: node, Device: device},
	}}})
	return claim
}

func (c *cluster) setSlice(before, after *resourceapi.ResourceSlice) func() {
	if after != nil {
		c.store.SetSlice(after)
	} else {
		c.store.DeleteSlice(before.Name)
	}
	generation := c.store.View().Generation()
	return func() { c.room.SliceChanged(before, after, generation) }
}

func (c *cluster) setClass(class *resourceapi.DeviceClass) func() {
	c.store.SetClass(class)
	generation := c.store.View().Generation()
	return func() { c.room.ClassChanged(class.Name, generation) }
}

// sleepers makes n pods that wait for a GPU each, in order of priority, and returns them.
func (c *cluster) sleepers(n int) []*v1.Pod {
	var pods []*v1.Pod
	for i := range n {
		pod := c.addPod(fmt.Sprintf("p%d", i), int32(1000-i), "gpu", 1)
		if node := c.try(pod); node != "" {
			c.t.Fatalf("pod %s fits %s", pod.Name, node)
		}
		pods = append(pods, pod)
	}
	if woken := c.pass(); len(woken) > 0 {
		c.t.Fatalf("%v woken though nothing has changed", woken)
	}
	return pods
}

var _ tb = (*testing.T)(nil)
