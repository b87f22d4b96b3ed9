// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

const driver = "gpu.nvidia.com"

// world is a cluster with one pod's claim, in the form that both allocators take.
type world struct {
	nodes  []*v1.Node
	slices []*resourceapi.ResourceSlice
	class  *resourceapi.DeviceClass
	claim  *resourceapi.ResourceClaim

	random *rand.Rand

	// What upstream's allocator works on.
	allocated  structured.AllocatedState
	sliceStore cache.Store
	celCache   *cel.Cache

	// What ours works on.
	index *usage.Index
	store *inventory.Store
	// strangers are the claim, compiled so that nothing of what is found for one of them is known for another. They take turns.
	strangers []*allocator.Requests
	turn      int
	// alike makes pods from one template: what is found for one is known for the next.
	alike bool
}

func newWorld() *world {
	w := &world{
		class: &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}},
		claim: &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: "claim"}},
		allocated: structured.AllocatedState{
			AllocatedDevices:         sets.New[structured.DeviceID](),
			AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
			AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
		},
		index:    usage.NewIndex(),
		random:   rand.New(rand.NewPCG(1, 2)),
		celCache: cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}),
	}
	w.class.Spec.Selectors = selectors(`device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type in ["gpu", "mig"]`)
	return w
}

func selectors(expressions ...string) []resourceapi.DeviceSelector {
	var out []resourceapi.DeviceSelector
	for _, expression := range expressions {
		out = append(out, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}})
	}
	return out
}

// addGPUs adds a node whose GPUs are published as the node agent does it, each in a slice of its own.
func (w *world) addGPUs(devices []resourceapi.Device) string {
	var lists [][]resourceapi.Device
	for i := range devices {
		lists = append(lists, devices[i:i+1])
	}
	return w.addNode(nil, lists...)
}

// addNode adds a node with one pool, a slice for each list of devices, and one more with counter sets if there are any.
func (w *world) addNode(counterSets []resourceapi.CounterSet, lists ...[]resourceapi.Device) string {
	name := fmt.Sprintf("node-%05d", len(w.nodes))
	w.nodes = append(w.nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name}}})
	add := func(i int) *resourceapi.ResourceSliceSpec {
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", name, i)}}
		slice.Spec.Driver, slice.Spec.NodeName = driver, &name
		slice.Spec.Pool = resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(lists))}
		if counterSets != nil {
			slice.Spec.Pool.ResourceSliceCount++
		}
		w.slices = append(w.slices, slice)
		return &slice.Spec
	}
	for i, devices := range lists {
		add(i).Devices = devices
	}
	if counterSets != nil {
		add(len(lists)).SharedCounters = counterSets
	}
	return name
}

// gpus are n devices with the attributes that the node agent publishes, in groups of so many that share a PCIe root.
func gpus(n, group int) []resourceapi.Device {
	devices := make([]resourceapi.Device, n)
	for i := range devices {
		devices[i] = resourceapi.Device{
			Name:       fmt.Sprintf("gpu-%d", i),
			Attributes: attributes("gpu", i, i/group),
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
		}
	}
	return devices
}

func attributes(kind string, gpu, root int) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	text := func(format string, args ...any) resourceapi.DeviceAttribute {
		return resourceapi.DeviceAttribute{StringValue: ptr.To(fmt.Sprintf(format, args...))}
	}
	version := func(v string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{VersionValue: &v} }
	return map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"type":                            text("%s", kind),
		"uuid":                            text("GPU-%08x-aaaa-bbbb-cccc-0123456789ab", gpu),
		"productName":                     text("NVIDIA H100 80GB HBM3"),
		"brand":                           text("Nvidia"),
		"architecture":                    text("Hopper"),
		"cudaComputeCapability":           version("9.0.0"),
		"driverVersion":                   version("580.65.6"),
		"cudaDriverVersion":               version("13.0.0"),
		"resource.kubernetes.io/pciBusID": text("0000:%02x:00.0", gpu),
		rootAttribute:                     text("pci0000:%02x", root),
		"resource.kubernetes.io/numaNode": {IntValue: ptr.To(int64(root % 2))},
	}
}

const rootAttribute = "resource.kubernetes.io/pcieRoot"

// hold gives a device, or a share of it, to a claim of its own.
func (w *world) hold(pool, device string, consumed map[resourceapi.QualifiedName]resource.Quantity) {
	result := resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: driver, Pool: pool, Device: device}
	id := structured.MakeDeviceID(driver, pool, device)
	claim := holder(w.index.View().Len() + len(w.allocated.AllocatedSharedDeviceIDs))
	if consumed == nil {
		w.allocated.AllocatedDevices.Insert(id)
	} else {
		result.ShareID, result.ConsumedCapacity = &claim.UID, consumed
		w.allocated.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
		w.allocated.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, consumed))
	}
	w.index.Set(claim, allocation(result), nil)
}

func allocation(results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.AllocationResult {
	return &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
}

// request adds a request to the claim.
func (w *world) request(count int64, expressions ...string) *resourceapi.ExactDeviceRequest {
	exact := &resourceapi.ExactDeviceRequest{
		DeviceClassName: "gpu", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count, Selectors: selectors(expressions...),
	}
	requests := &w.claim.Spec.Devices.Requests
	*requests = append(*requests, resourceapi.DeviceRequest{Name: fmt.Sprintf("request-%d", len(*requests)), Exactly: exact})
	return exact
}

func (w *world) matchAttribute(name resourceapi.FullyQualifiedName) {
	w.claim.Spec.Devices.Constraints = append(w.claim.Spec.Devices.Constraints, resourceapi.DeviceConstraint{MatchAttribute: &name})
}

// inventory is filled by events, once.
func (w *world) inventory() *inventory.Store {
	if w.store == nil {
		w.store = inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()})
		w.store.SetClass(w.class)
		for _, slice := range w.slices {
			w.store.SetSlice(slice)
		}
	}
	return w.store
}

// informed is the store of kube-scheduler's tracker of slices, filled by events, once.
func (w *world) informed() cache.Store {
	if w.sliceStore == nil {
		w.sliceStore = cache.NewStore(cache.MetaNamespaceKeyFunc)
		for _, slice := range w.slices {
			if err := w.sliceStore.Add(slice); err != nil {
				panic(err) // these objects have names
			}
		}
	}
	return w.sliceStore
}

var upstreamFeatures = structured.Features{
	AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
	FractionalCapacityRange: true, PartitionableDevices: true, PrioritizedList: true,
}

// filterUpstream does for one pod what kube-scheduler's plugin does: it lists the slices, copies what is allocated, makes
// an allocator, and allocates on every node. It returns the number of nodes that fit. The
// limit is for all nodes together; what comes later counts as not fitting.
func (w *world) filterUpstream(limit time.Duration) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	allocated := structured.AllocatedState{
		AllocatedDevices:         w.allocated.AllocatedDevices.Clone(),
		AllocatedSharedDeviceIDs: w.allocated.AllocatedSharedDeviceIDs.Clone(),
		AggregatedCapacity:       w.allocated.AggregatedCapacity.Clone(),
	}
	listed := w.informed().List()
	slices := make([]*resourceapi.ResourceSlice, 0, len(listed))
	for _, object := range listed {
		slices = append(slices, object.(*resourceapi.ResourceSlice))
	}
	upstream, err := structured.NewAllocator(ctx, upstreamFeatures, allocated, classLister{w.class}, slices, w.celCache)
	if err != nil {
		return 0, err
	}
	fit := 0
	claims := []*resourceapi.ResourceClaim{w.claim}
	for _, node := range w.nodes {
		result, err := upstream.Allocate(ctx, node, claims)
		if err != nil {
			return fit, err
		}
		if result != nil {
			fit++
		}
	}
	return fit, nil
}

// filterOurs does the same with ours.
func (w *world) filterOurs() (int, error) {
	ctx := context.Background()
	view := w.inventory().View()
	requests, err := w.compile(view)
	if err != nil {
		return 0, err
	}
	if !w.alike {
		if w.strangers == nil {
			if err := w.estrange(); err != nil {
				return 0, err
			}
		}
		w.turn++
		requests = w.strangers[w.turn%len(w.strangers)]
	}
	fit := 0
	for _, node := range w.nodes {
		result := allocator.Check(ctx, allocator.Input{Requests: requests, Node: node, Inventory: view, Usage: w.index.View()})
		if result.Fits() {
			fit++
		} else if result.Failure.Err != nil {
			return fit, result.Failure.Err
		}
	}
	return fit, nil
}

func (w *world) compile(view *inventory.View) (*allocator.Requests, error) {
	return allocator.Compile([]*resourceapi.ResourceClaim{w.claim}, view, allocator.DefaultFeatures())
}

// estrange fills strangers, once: in between so many other kinds of pods come by that each time the claim is as new.
func (w *world) estrange() error {
	view := w.inventory().View()
	for i := range 9 {
		requests, err := w.compile(view)
		if err != nil {
			return err
		}
		w.strangers = append(w.strangers, requests)
		for other := range 2 * inventory.MaxNumbers {
			view.NumberOf(w.claim.Namespace, fmt.Sprintf("another kind %d %d", i, other))
		}
	}
	return nil
}

// classLister serves upstream's allocator.
type classLister struct{ class *resourceapi.DeviceClass }

func (l classLister) List() ([]*resourceapi.DeviceClass, error) {
	return []*resourceapi.DeviceClass{l.class}, nil
}

func (l classLister) Get(name string) (*resourceapi.DeviceClass, error) {
	if name == l.class.Name {
		return l.class, nil
	}
	return nil, apierrors.NewNotFound(resourceapi.Resource("deviceclasses"), name)
}
