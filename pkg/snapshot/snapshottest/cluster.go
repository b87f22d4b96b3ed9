// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package snapshottest makes clusters for tests and benchmarks: nodes with GPUs as the node agent publishes them, pods and their claims.
package snapshottest

import (
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/snapshot"
)

const (
	// Driver and Class are those of the GPUs.
	Driver = "gpu.nvidia.com"
	Class  = "gpu.nvidia.com"
)

// Now is when the clusters are.
var Now = metav1.NewTime(time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC))

// Cluster is one under construction.
type Cluster struct {
	snapshot.Objects
	made int
}

// New returns a cluster of n nodes, "worker-0" and so on, with that many GPUs each, half of them on either NUMA node,
// and all in one NVLink domain.
func New(nodes, gpus int) *Cluster {
	c := &Cluster{}
	class := &resourceapi.DeviceClass{}
	class.Name = Class
	class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == "gpu"`,
	}}}
	c.identify(class)
	c.DeviceClasses = append(c.DeviceClasses, class)
	for i := range nodes {
		name := fmt.Sprintf("worker-%d", i)
		resources := v1.ResourceList{
			v1.ResourceCPU: resource.MustParse("192"), v1.ResourceMemory: resource.MustParse("2Ti"),
			v1.ResourcePods: resource.MustParse("110"),
		}
		node := &v1.Node{Status: v1.NodeStatus{Capacity: resources, Allocatable: resources}}
		node.Name, node.Labels = name, map[string]string{v1.LabelHostname: name, v1.LabelInstanceTypeStable: "p5"}
		c.identify(node)
		c.Nodes = append(c.Nodes, node)
		slice := &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{
			Driver: Driver, NodeName: &name, Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
		}}
		slice.Name = name + "-gpus"
		for g := range gpus {
			slice.Spec.Devices = append(slice.Spec.Devices, gpu(i, g, gpus))
		}
		c.identify(slice)
		c.ResourceSlices = append(c.ResourceSlices, slice)
	}
	return c
}

func gpu(node, g, of int) resourceapi.Device {
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	return resourceapi.Device{
		Name: fmt.Sprintf("gpu-%d", g),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"type": text("gpu"), "uuid": text(fmt.Sprintf("GPU-%d-%d", node,
				g)), "productName": text("NVIDIA H100 80GB HBM3"), "nvlinkDomain": text(fmt.Sprintf("nvl-%d", node)),
			"resource.kubernetes.io/numaNode": {IntValue: ptr.To(int64(2 * g / of))},
		},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
	}
}

func (c *Cluster) identify(o metav1.Object) {
	c.made++
	o.SetUID(types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", c.made)))
	o.SetResourceVersion(fmt.Sprint(c.made))
	o.SetCreationTimestamp(metav1.NewTime(Now.Add(-time.Hour)))
}

// Pod adds a pod that waits, with a claim of its name for n GPUs.
func (c *Cluster) Pod(namespace, name string, n int, priority int32) (*v1.Pod, *resourceapi.ResourceClaim) {
	claim := &resourceapi.ResourceClaim{}
	claim.Namespace, claim.Name = namespace, name
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{
		Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: Class,
			AllocationMode:  resourceapi.DeviceAllocationModeExactCount, Count: int64(n),
		},
	}}
	c.identify(claim)
	pod := &v1.Pod{
		Spec: v1.PodSpec{
			SchedulerName: "stowage", Priority: &priority, PreemptionPolicy: ptr.To(v1.PreemptLowerPriority),
			ResourceClaims: []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim.Name}},
			Containers: []v1.Container{{Name: "main", Image: "example.com/main", Resources: v1.ResourceRequirements{
				Claims: []v1.ResourceClaim{{Name: "gpu"}}, Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("1")},
			}}},
		},
		Status: v1.PodStatus{Phase: v1.PodPending},
	}
	pod.Namespace, pod.Name = namespace, name
	c.identify(pod)
	c.Pods, c.ResourceClaims = append(c.Pods, pod), append(c.ResourceClaims, claim)
	return pod, claim
}

// Run adds a pod that runs on a node and holds the GPUs.
func (c *Cluster) Run(namespace, name string, priority int32, node int, gpus ...int) (*v1.Pod, *resourceapi.ResourceClaim) {
	pod, claim := c.Pod(namespace, name, len(gpus), priority)
	where := fmt.Sprintf("worker-%d", node)
	pod.Spec.NodeName, pod.Status.Phase = where, v1.PodRunning
	start := metav1.NewTime(Now.Add(-time.Hour + time.Duration(c.made)*time.Second))
	pod.Status.StartTime = &start
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: pod.UID}}
	claim.Status.Allocation = &resourceapi.AllocationResult{NodeSelector: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
		MatchFields: []v1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: v1.NodeSelectorOpIn, Values: []string{where}}},
	}}}}
	for _, g := range gpus {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: "gpu", Driver: Driver, Pool: where, Device: fmt.Sprintf("gpu-%d", g),
		})
	}
	return pod, claim
}

// Taint taints a GPU.
func (c *Cluster) Taint(node, g int, key string) {
	device := &c.ResourceSlices[node].Spec.Devices[g]
	device.Taints = append(device.Taints, resourceapi.DeviceTaint{Key: key, Effect: resourceapi.DeviceTaintEffectNoSchedule})
}

// Snapshot is the cluster at Now.
func (c *Cluster) Snapshot() *snapshot.Snapshot {
	s := snapshot.New(c.Objects.Clone())
	s.Taken, s.ServerVersion = Now, "v1.37.1"
	return s
}

// Full returns a cluster of nodes with 8 GPUs each of which nearly all are held by a pod: the first GPU of every third node is free.
func Full(nodes int) *Cluster {
	c := New(nodes, 8)
	for i := range nodes {
		for g := range 8 {
			if g > 0 || i%3 > 0 {
				c.Run(fmt.Sprintf("team-%d", i%7), fmt.Sprintf("job-%d-%d", i, g), 0, i, g)
			}
		}
	}
	return c
}
