// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

const (
	driver        = "gpu.nvidia.com"
	deviceClass   = "gpu.nvidia.com" // of the manifests
	schedulerName = "stowage"
	// phaseLabel stands on the pods that the scheduler is to bind.
	phaseLabel = "scale.stowage.dev/phase"
)

// newNode is a node that has room for every pod. No kubelet stands behind it.
func newNode(i int) *corev1.Node {
	name := nodeName(i)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			corev1.LabelHostname: name, corev1.LabelTopologyZone: fmt.Sprintf("zone-%d", i%3),
		}},
		Status: corev1.NodeStatus{
			Capacity: corev1.ResourceList{
				corev1.ResourceCPU:    resource.MustParse("192"),
				corev1.ResourceMemory: resource.MustParse("2Ti"),
				corev1.ResourcePods:   resource.MustParse("110"),
			},
			Conditions: []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Scale",
				LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
			}},
		},
	}
	node.Status.Allocatable = node.Status.Capacity
	return node
}

// newSlices are the slices of a node's pool, with the attributes that the node agent publishes. Two GPUs are below one PCIe root.
func newSlices(node, gpusPerSlice int) []*resourceapi.ResourceSlice {
	var devices []resourceapi.Device
	for gpu := range gpusPerNode {
		version := func(v string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{VersionValue: &v} }
		text := func(v string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &v} }
		devices = append(devices, resourceapi.Device{
			Name: gpuName(gpu),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"architecture":                    text("Hopper"),
				"brand":                           text("Nvidia"),
				"cudaComputeCapability":           version("9.0.0"),
				"cudaDriverVersion":               version("13.0.0"),
				"driverVersion":                   version("580.105.8"),
				"nvlinkDomain":                    text("nvlink-" + gpuName(0)),
				"productName":                     text("NVIDIA H100 80GB HBM3"),
				"resource.kubernetes.io/numaNode": {IntValue: ptr.To(int64(gpu / 4))},
				"resource.kubernetes.io/pciBusID": text(fmt.Sprintf("0000:%02x:00.0", 0x10*(gpu+1))),
				"resource.kubernetes.io/pcieRoot": text(fmt.Sprintf("pci0000:%02x", 0x10*(gpu/2*2+1)-1)),
				"type":                            text("gpu"),
				"uuid":                            text(fmt.Sprintf("GPU-00000000-0000-4000-8000-%08x%04x", node, gpu)),
			},
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("81559Mi")}},
		})
	}
	var all []*resourceapi.ResourceSlice
	for some := range slices.Chunk(devices, gpusPerSlice) {
		all = append(all, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%s-%d", nodeName(node), driver, len(all))},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: driver, NodeName: ptr.To(nodeName(node)), Devices: some,
				Pool: resourceapi.ResourcePool{Name: nodeName(node), Generation: 1, ResourceSliceCount: int64(gpusPerNode / gpusPerSlice)},
			},
		})
	}
	return all
}

func gpuName(gpu int) string { return fmt.Sprintf("gpu-0000-%02x-00-0", 0x10*(gpu+1)) }

// newClaim is the claim of a holding as its user makes it, with what its allocation will put into the main resource.
func newClaim(h *holding) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: h.namespace, Name: h.name},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{gpus(h.count, "")}}},
	}
	if h.allocated() {
		claim.Finalizers = []string{resourceapi.Finalizer}
	}
	return claim
}

// newAllocation is what a scheduler writes for a holding.
func newAllocation(h *holding) *resourceapi.AllocationResult {
	allocation := &resourceapi.AllocationResult{
		AllocationTimestamp: ptr.To(metav1.Now()),
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
			Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{nodeName(h.node)},
		}}}}},
	}
	for _, gpu := range h.gpus {
		allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: "gpus", Driver: driver, Pool: nodeName(h.node), Device: gpuName(gpu),
		})
	}
	return allocation
}

func consumer(name string, uid types.UID) resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: uid}
}

// gpus asks for n GPUs; selector may narrow them down.
func gpus(n int, selector string) resourceapi.DeviceRequest {
	exactly := &resourceapi.ExactDeviceRequest{
		DeviceClassName: deviceClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(n),
	}
	if selector != "" {
		exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: selector}}}
	}
	return resourceapi.DeviceRequest{Name: "gpus", Exactly: exactly}
}

// template is a kind of claim for the pods that the scheduler is to bind.
type template struct {
	name   string
	weight int // how often it comes
	count  int // GPUs
	spec   resourceapi.DeviceClaim
}

// templates are what users of GPUs ask for; see manifests/examples.
var templates = []template{
	{name: "one-gpu", weight: 60, count: 1, spec: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{gpus(1, "")}}},
	{name: "memory-79gi", weight: 20, count: 1, spec: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
		gpus(1, `device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("79Gi")) >= 0`),
	}}},
	{name: "two-gpus-one-pcie-root", weight: 14, count: 2, spec: resourceapi.DeviceClaim{
		Requests:    []resourceapi.DeviceRequest{gpus(2, "")},
		Constraints: []resourceapi.DeviceConstraint{{MatchAttribute: ptr.To(resourceapi.FullyQualifiedName("resource.kubernetes.io/pcieRoot"))}},
	}},
	{name: "four-gpus", weight: 5, count: 4, spec: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{gpus(4, "")}}},
	{name: "eight-gpus", weight: 1, count: 8, spec: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{gpus(8, "")}}},
}

// unsatisfiable is for GPUs that no node has.
var unsatisfiable = template{name: "unsatisfiable", spec: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
	gpus(1, `device.attributes["gpu.nvidia.com"].productName == "NVIDIA B200"`),
}}}

func newTemplate(namespace string, t template) *resourceapi.ResourceClaimTemplate {
	return &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: t.name},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: t.spec}},
	}
}

// newPod has one claim; use fills in which.
func newPod(namespace, name string, claim corev1.PodResourceClaim) *corev1.Pod {
	claim.Name = "gpus"
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{
			SchedulerName:                 schedulerName,
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			AutomountServiceAccountToken:  ptr.To(false),
			ResourceClaims:                []corev1.PodResourceClaim{claim},
			Containers: []corev1.Container{{
				Name: "main", Image: "stowage.dev/none",
				Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("16Gi")},
					Claims:   []corev1.ResourceClaim{{Name: "gpus"}},
				},
			}},
		},
	}
}
