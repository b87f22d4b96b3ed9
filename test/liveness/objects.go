// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/pkg/apis/scheduling"
	"k8s.io/utils/ptr"
)

const (
	namespace = "team-a"
	driver    = "gpu.nvidia.com"
	// extended is the extended resource that the class for whole GPUs stands for, extendedHalf that of the class for halves.
	extended     = "nvidia.com/gpu"
	extendedHalf = "nvidia.com/half"
	// guarded is a label of the pods that a budget is for.
	guarded = "guarded"
)

// unready is how the names of devices begin that are never attached.
const unready = "unready"

// The conditions of devices that have to be attached.
const (
	attached     = "attached"
	attachFailed = "attach-failed"
)

// The classes, each for the devices of a type.
const (
	gpuClass   = "gpu"
	halfClass  = "half"
	shareClass = "share"
)

var classNames = []string{gpuClass, halfClass, shareClass}

func (n Node) object() *v1.Node {
	room := v1.ResourceList{
		v1.ResourceCPU: resource.MustParse("1000"), v1.ResourceMemory: resource.MustParse("1Ti"), v1.ResourcePods: resource.MustParse("1000"),
	}
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: map[string]string{v1.LabelHostname: n.Name}},
		Status:     v1.NodeStatus{Capacity: room, Allocatable: room},
	}
}

// slices are the node's pool: its devices, and the counters that its halved GPUs are made of.
func (n Node) slices() []*resourceapi.ResourceSlice {
	slice := func(name string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: driver, NodeName: ptr.To(n.Name), Pool: resourceapi.ResourcePool{Name: n.Name, Generation: 1, ResourceSliceCount: 1},
			},
		}
	}
	devices, counters := slice(n.Name), slice(n.Name+"-counters")
	add := func(name, class string) *resourceapi.Device {
		devices.Spec.Devices = append(devices.Spec.Devices, resourceapi.Device{
			Name: name, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: ptr.To(class)}},
		})
		return &devices.Spec.Devices[len(devices.Spec.Devices)-1]
	}
	for i := range n.GPUs {
		add(fmt.Sprintf("gpu-%d", i), gpuClass)
	}
	for i := range n.Attached + n.Unready {
		device := add(fmt.Sprintf("attached-%d", i), gpuClass)
		device.BindingConditions, device.BindingFailureConditions = []string{attached}, []string{attachFailed}
		if i >= n.Attached {
			device.Name = fmt.Sprintf("%s-%d", unready, i)
		}
	}
	for i := range n.Shared {
		device := add(fmt.Sprintf("shared-%d", i), shareClass)
		device.AllowMultipleAllocations = ptr.To(true)
		device.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"parts": {Value: resource.MustParse("100")}}
	}
	for i := range n.Halved {
		set := fmt.Sprintf("set-%d", i)
		takes := func(device *resourceapi.Device, parts string) {
			device.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{
				CounterSet: set, Counters: map[string]resourceapi.Counter{"parts": {Value: resource.MustParse(parts)}},
			}}
		}
		takes(add(fmt.Sprintf("halved-%d", i), gpuClass), "2")
		takes(add(fmt.Sprintf("half-%d-0", i), halfClass), "1")
		takes(add(fmt.Sprintf("half-%d-1", i), halfClass), "1")
		counters.Spec.SharedCounters = append(counters.Spec.SharedCounters, resourceapi.CounterSet{
			Name: set, Counters: map[string]resourceapi.Counter{"parts": {Value: resource.MustParse("2")}},
		})
	}
	if n.Halved == 0 {
		return []*resourceapi.ResourceSlice{devices}
	}
	devices.Spec.Pool.ResourceSliceCount, counters.Spec.Pool.ResourceSliceCount = 2, 2
	return []*resourceapi.ResourceSlice{devices, counters}
}

func (c Class) object() *resourceapi.DeviceClass {
	expression := fmt.Sprintf(`device.attributes[%q].type == %q`, driver, c.Name)
	if c.Broken {
		expression = fmt.Sprintf(`device.attributes[%q].typo == %q`, driver, c.Name)
	}
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: c.Name}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}},
	}}
	switch c.Name {
	case gpuClass:
		class.Spec.ExtendedResourceName = ptr.To(extended)
	case halfClass:
		class.Spec.ExtendedResourceName = ptr.To(extendedHalf)
	}
	return class
}

func (a Ask) spec() resourceapi.ResourceClaimSpec {
	var spec resourceapi.ResourceClaimSpec
	add := func(class string, count int) *resourceapi.ExactDeviceRequest {
		request := &resourceapi.ExactDeviceRequest{
			DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(count),
		}
		spec.Devices.Requests = append(spec.Devices.Requests, resourceapi.DeviceRequest{Name: class, Exactly: request})
		return request
	}
	if a.GPUs > 0 {
		add(gpuClass, a.GPUs)
	}
	if a.Halves > 0 {
		add(halfClass, a.Halves)
	}
	if a.Share > 0 {
		add(shareClass, 1).Capacity = &resourceapi.CapacityRequirements{
			Requests: map[resourceapi.QualifiedName]resource.Quantity{"parts": *resource.NewQuantity(int64(a.Share), resource.DecimalSI)},
		}
	}
	return spec
}

func (p Pod) object() *v1.Pod {
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: namespace},
		Spec: v1.PodSpec{
			SchedulerName: schedulerName, Priority: ptr.To(p.Priority), PreemptionPolicy: ptr.To(v1.PreemptLowerPriority),
			TerminationGracePeriodSeconds: ptr.To(int64(p.Grace / time.Second)), RestartPolicy: v1.RestartPolicyNever,
			Containers: []v1.Container{{Name: "main", Image: "x"}},
		},
	}
	if p.Foreign {
		pod.Spec.SchedulerName = "another"
	}
	if p.Guarded {
		pod.Labels = map[string]string{guarded: "true"}
	}
	use := func(claim v1.PodResourceClaim) {
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, claim)
		resources := &pod.Spec.Containers[0].Resources
		resources.Claims = append(resources.Claims, v1.ResourceClaim{Name: claim.Name})
	}
	if p.Ask != (Ask{}) {
		use(v1.PodResourceClaim{Name: "own", ResourceClaimTemplateName: ptr.To(p.Name)})
	}
	for i, claim := range p.Claims {
		use(v1.PodResourceClaim{Name: useOf(claim, i), ResourceClaimName: ptr.To(claim)})
	}
	if p.Group != "" {
		pod.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: ptr.To(p.Group)}
	}
	if p.Common {
		use(v1.PodResourceClaim{Name: common, ResourceClaimTemplateName: ptr.To(p.Group)})
	}
	amount := v1.ResourceList{}
	for name, n := range map[v1.ResourceName]int{extended: p.Extended, extendedHalf: p.ExtendedHalves} {
		if n > 0 {
			amount[name] = *resource.NewQuantity(int64(n), resource.DecimalSI)
		}
	}
	if len(amount) > 0 {
		pod.Spec.Containers[0].Resources.Requests, pod.Spec.Containers[0].Resources.Limits = amount, amount
	}
	return pod
}

// common is the name that groups and their pods have for the group's own claim, useOf that for the i-th of their other claims. A claim
// is reserved for the group where both have the same name for it.
const common = "common"

func useOf(claim string, i int) string { return fmt.Sprintf("%s-%d", claim, i) }

func (g Group) object() *schedulingapi.PodGroup {
	group := &schedulingapi.PodGroup{
		ObjectMeta: metav1.ObjectMeta{Name: g.Name, Namespace: namespace, Finalizers: []string{scheduling.PodGroupProtectionFinalizer}},
		Spec:       schedulingapi.PodGroupSpec{Priority: ptr.To(g.Priority)},
	}
	if g.Gang > 0 {
		group.Spec.SchedulingPolicy.Gang = &schedulingapi.GangSchedulingPolicy{MinCount: int32(g.Gang)}
	} else {
		group.Spec.SchedulingPolicy.Basic = &schedulingapi.BasicSchedulingPolicy{}
	}
	if g.Whole {
		group.Spec.DisruptionMode = &schedulingapi.DisruptionMode{All: &schedulingapi.AllDisruptionMode{}}
	}
	use := func(claim schedulingapi.PodGroupResourceClaim) {
		group.Spec.ResourceClaims = append(group.Spec.ResourceClaims, claim)
	}
	if g.Ask != (Ask{}) {
		use(schedulingapi.PodGroupResourceClaim{Name: common, ResourceClaimTemplateName: ptr.To(g.Name)})
	}
	for i, claim := range g.Claims {
		use(schedulingapi.PodGroupResourceClaim{Name: useOf(claim, i), ResourceClaimName: ptr.To(claim)})
	}
	return group
}
