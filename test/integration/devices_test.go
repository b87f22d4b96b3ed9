// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// product is what the GPUs of one model have in common.
type product struct {
	name, architecture, computeCapability string
	memory                                string
	gpusPerRoot                           int // below one PCIe root complex
}

var (
	h100 = product{"NVIDIA H100 80GB HBM3", "Hopper", "9.0.0", "81559Mi", 1}
	a100 = product{"NVIDIA A100-SXM4-40GB", "Ampere", "8.0.0", "40Gi", 2}
	l40s = product{"NVIDIA L40S", "Ada Lovelace", "8.9.0", "46068Mi", 4}
)

// gpus makes the devices of a node with n GPUs of one product, named gpu-0 and so on, with the attributes
// and the capacity that the node agent publishes. change, if given, edits each.
func gpus(p product, n int, change ...func(i int, d *resourceapi.Device)) []resourceapi.Device {
	devices := make([]resourceapi.Device, n)
	for i := range devices {
		devices[i] = resourceapi.Device{
			Name: fmt.Sprintf("gpu-%d", i),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"type":                            text("gpu"),
				"uuid":                            text(fmt.Sprintf("GPU-%08x-0000-4000-8000-%012x", len(p.name), i)),
				"productName":                     text(p.name),
				"brand":                           text("Nvidia"),
				"architecture":                    text(p.architecture),
				"cudaComputeCapability":           version(p.computeCapability),
				"driverVersion":                   version("580.95.5"),
				"cudaDriverVersion":               version("13.0.0"),
				"resource.kubernetes.io/pciBusID": text(fmt.Sprintf("0000:%02x:00.0", 0x10+i)),
				"resource.kubernetes.io/pcieRoot": text(fmt.Sprintf("pci0000:%02x", 0x10*(i/p.gpusPerRoot))),
				"resource.kubernetes.io/numaNode": number(int64(2 * i / n)),
			},
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
				"memory": {Value: resource.MustParse(p.memory)},
			},
		}
		for _, c := range change {
			c(i, &devices[i])
		}
	}
	return devices
}

// tainted puts a taint on the first n devices.
func tainted(n int, taint resourceapi.DeviceTaint) func(int, *resourceapi.Device) {
	return func(i int, d *resourceapi.Device) {
		if i < n {
			d.Taints = append(d.Taints, taint)
		}
	}
}

func text(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }

func version(s string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{VersionValue: &s}
}

func number(n int64) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValue: &n} }

// addNode makes a node with room for any pod, and its slice. The suffix names it within the world.
func (w *world) addNode(suffix string, devices ...resourceapi.Device) {
	w.t.Helper()
	name := w.nodeName(suffix)
	node := &v1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:   name,
			Labels: map[string]string{worldLabel: w.name, v1.LabelHostname: name},
		},
		Status: v1.NodeStatus{
			Capacity: v1.ResourceList{
				v1.ResourceCPU:    resource.MustParse("128"),
				v1.ResourceMemory: resource.MustParse("1Ti"),
				v1.ResourcePods:   resource.MustParse("1000"),
			},
			Conditions: []v1.NodeCondition{{
				Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "Test",
				LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
			}},
		},
	}
	node.Status.Allocatable = node.Status.Capacity
	_, err := w.client.CoreV1().Nodes().Create(w.ctx, node, metav1.CreateOptions{})
	w.must(err, "creating node %s", name)
	// Admission taints every new node as not ready; the controller that takes the taint away takes its time.
	_, err = w.client.CoreV1().Nodes().Patch(w.ctx, name, types.MergePatchType, []byte(`{"spec":{"taints":null}}`), metav1.PatchOptions{})
	w.must(err, "removing the taints of node %s", name)
	w.t.Cleanup(func() { w.cleanUp(w.client.CoreV1().Nodes().Delete, name) })
	if len(devices) > 0 {
		w.addSlice(w.slice(suffix, devices...))
	}
}

// slice is the only slice of the node's pool, not created yet.
func (w *world) slice(nodeSuffix string, devices ...resourceapi.Device) *resourceapi.ResourceSlice {
	name := w.nodeName(nodeSuffix)
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   w.driver,
			Pool:     resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
			NodeName: &name,
			Devices:  devices,
		},
	}
}

func (w *world) addSlice(slice *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
	w.t.Helper()
	created, err := w.client.ResourceV1().ResourceSlices().Create(w.ctx, slice, metav1.CreateOptions{})
	w.must(err, "creating slice %s", slice.Name)
	w.t.Cleanup(func() { w.cleanUp(w.client.ResourceV1().ResourceSlices().Delete, slice.Name) })
	return created
}

// awaitSlices waits until the scheduler has heard of the world's slices. What it tells of a pod that it tries before is not told anew when
// they come and do not help.
func (w *world) awaitSlices(s *scheduler) {
	w.t.Helper()
	list, err := w.client.ResourceV1().ResourceSlices().List(w.ctx, metav1.ListOptions{})
	w.must(err, "listing slices")
	lister := s.probe.handle.SharedInformerFactory().Resource().V1().ResourceSlices().Lister()
	w.eventually("the scheduler knows the slices", func() bool {
		for _, slice := range list.Items {
			if _, err := lister.Get(slice.Name); err != nil && slice.Spec.Driver == w.driver {
				return false
			}
		}
		return true
	})
}

// addClass makes a class with the given selectors, which can use $DRIVER for the world's driver.
func (w *world) addClass(name string, selectors ...string) *resourceapi.DeviceClass {
	w.t.Helper()
	class, err := w.client.ResourceV1().DeviceClasses().Create(w.ctx, &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.DeviceClassSpec{Selectors: w.selectors(selectors...)},
	}, metav1.CreateOptions{})
	w.must(err, "creating class %s", name)
	w.t.Cleanup(func() { w.cleanUp(w.client.ResourceV1().DeviceClasses().Delete, name) })
	return class
}

// addTaintRule taints the given devices of a node.
func (w *world) addTaintRule(nodeSuffix, device string, taint resourceapi.DeviceTaint) string {
	w.t.Helper()
	name, pool := w.name+"-"+nodeSuffix+"-"+device, w.nodeName(nodeSuffix)
	_, err := w.client.ResourceV1().DeviceTaintRules().Create(w.ctx, &resourceapi.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: &w.driver, Pool: &pool, Device: &device},
			Taint:          taint,
		},
	}, metav1.CreateOptions{})
	w.must(err, "creating taint rule %s", name)
	w.t.Cleanup(func() { w.cleanUp(w.client.ResourceV1().DeviceTaintRules().Delete, name) })
	return name
}
