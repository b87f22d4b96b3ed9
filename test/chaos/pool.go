// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// What a node has: 25 devices, so that 8 nodes have 200.
const (
	nodes           = 8
	wholePerNode    = 7
	migPerNode      = 2 // GPUs with 7 partitions each
	partsPerMIG     = 7
	sharedPerNode   = 4
	driver          = "gpu.nvidia.com"
	deviceClass     = "chaos"
	memoryOfAGPU    = 80
	memoryOfAShared = 40
)

// pool is the nodes and slices that all schedulers share. Nothing of it changes
// during a run.
type pool struct {
	slices []*resourceapi.ResourceSlice
}

func newPool() *pool {
	p := &pool{}
	for i := range nodes {
		p.slices = append(p.slices, slicesOf(nodeName(i))...)
	}
	return p
}

func nodeName(i int) string { return fmt.Sprintf("chaos-%d", i) }

func (p *pool) devices() int {
	n := 0
	for _, s := range p.slices {
		n += len(s.Spec.Devices)
	}
	return n
}

// slicesOf are the slices of a node's pool: whole GPUs, partitions, what the
// partitions draw from, and GPUs that are shared by capacity.
func slicesOf(node string) []*resourceapi.ResourceSlice {
	whole, parts, counters, shared := newSlice(node, "whole"), newSlice(node, "parts"), newSlice(node, "counters"), newSlice(node, "shared")
	for i := range wholePerNode {
		whole.Spec.Devices = append(whole.Spec.Devices, device(fmt.Sprintf("gpu-%d", i), "gpu"))
	}
	for i := range migPerNode {
		gpu := fmt.Sprintf("mig-%d", i)
		parts.Spec.Devices = append(parts.Spec.Devices, partition(gpu, "full", 0, 4))
		for j := range 2 {
			parts.Spec.Devices = append(parts.Spec.Devices, partition(gpu, "half", j, 2))
		}
		for j := range 4 {
			parts.Spec.Devices = append(parts.Spec.Devices, partition(gpu, "quarter", j, 1))
		}
		set := resourceapi.CounterSet{Name: gpu, Counters: map[string]resourceapi.Counter{"memory": {Value: gibi(memoryOfAGPU)}}}
		for j := range 4 {
			set.Counters[memorySlice(j)] = resourceapi.Counter{Value: resource.MustParse("1")}
		}
		counters.Spec.SharedCounters = append(counters.Spec.SharedCounters, set)
	}
	for i := range sharedPerNode {
		d := device(fmt.Sprintf("shared-%d", i), "shared")
		d.AllowMultipleAllocations = ptr.To(true)
		d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {
			Value: gibi(memoryOfAShared),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default:    ptr.To(gibi(10)),
				ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(gibi(5)), Step: ptr.To(gibi(5))},
			},
		}}
		shared.Spec.Devices = append(shared.Spec.Devices, d)
	}
	return []*resourceapi.ResourceSlice{whole, parts, counters, shared}
}

func newSlice(node, suffix string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: node + "-" + suffix},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   driver,
			NodeName: ptr.To(node),
			Pool:     resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 4},
		},
	}
}

func device(name, kind string) resourceapi.Device {
	return resourceapi.Device{
		Name:       name,
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: ptr.To(kind)}},
	}
}

// partition is number i of those that take size of the four memory slices.
func partition(gpu, kind string, i, size int) resourceapi.Device {
	d := device(fmt.Sprintf("%s-%s-%d", gpu, kind, i), kind)
	counters := map[string]resourceapi.Counter{"memory": {Value: gibi(size * memoryOfAGPU / 4)}}
	for j := i * size; j < (i+1)*size; j++ {
		counters[memorySlice(j)] = resourceapi.Counter{Value: resource.MustParse("1")}
	}
	d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: gpu, Counters: counters}}
	return d
}

func memorySlice(i int) string { return fmt.Sprintf("memory-slice-%d", i) }

func gibi(n int) resource.Quantity { return *resource.NewQuantity(int64(n)<<30, resource.BinarySI) }

// create makes nodes, slices and the class.
func (p *pool) create(ctx context.Context, client kubernetes.Interface) error {
	for i := range nodes {
		if err := createNode(ctx, client, nodeName(i)); err != nil {
			return err
		}
	}
	for i, s := range p.slices {
		created, err := client.ResourceV1().ResourceSlices().Create(ctx, s, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("creating slice %s: %w", s.Name, err)
		}
		p.slices[i] = created
	}
	class := &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: deviceClass},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
			CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "` + driver + `"`},
		}}},
	}
	if _, err := client.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("creating class %s: %w", class.Name, err)
	}
	return nil
}

// createNode makes a node with room for any number of pods. No kubelet stands
// behind it.
func createNode(ctx context.Context, client kubernetes.Interface, name string) error {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}},
		Status: corev1.NodeStatus{
			Capacity: corev1.ResourceList{
				corev1.ResourceCPU:    resource.MustParse("1000"),
				corev1.ResourceMemory: resource.MustParse("4Ti"),
				corev1.ResourcePods:   resource.MustParse("5000"),
			},
			Conditions: []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Chaos",
				LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
			}},
		},
	}
	node.Status.Allocatable = node.Status.Capacity
	if _, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("creating node %s: %w", name, err)
	}
	// Admission taints every new node as not ready; the controller that takes the taint away takes its time.
	if _, err := client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, []byte(`{"spec":{"taints":null}}`),
		metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("removing the taints of node %s: %w", name, err)
	}
	return nil
}
