// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"context"
	"fmt"
	slicesutil "slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/allocator/internal/checker"
)

// world is a random cluster, and the claims of one pod for it. It is small, because upstream's search is exponential,
// and scarce, because that is where searches differ.
type world struct {
	features structured.Features
	nodes    []*v1.Node
	slices   []*resourceapi.ResourceSlice
	classes  []*resourceapi.DeviceClass
	held     []resourceapi.AllocationResult
	claims   []*resourceapi.ResourceClaim
}

const (
	driverA = "a.example.com"
	driverB = "b.example.com"
)

var (
	classSelectors = []string{
		`true`,
		`device.driver == "a.example.com"`,
		`device.attributes["a.example.com"].?model.orValue("") == "x"`,
		`device.allowMultipleAllocations == true`,
		failingSelector,
	}
	requestSelectors = []string{
		`device.driver == "b.example.com"`,
		`device.attributes["example.com"].?numa.orValue(0) == 0`,
		`device.capacity["a.example.com"].?memory.orValue(quantity("0")).compareTo(quantity("3")) >= 0`,
		`device.allowMultipleAllocations == false`,
	}
	attributeNames = []resourceapi.FullyQualifiedName{"example.com/numa", driverA + "/model", "example.com/numa", "example.com/mixed", "example.com/derived"}
)

var derivations = []string{
	`"same"`,
	`device.driver`,
	`device.attributes["a.example.com"].?model.orValue("none")`,
	`device.attributes["example.com"].?numa.orValue(0)`,
	`[device.driver, "same"]`,
	failingDerivation,
}

// What fails at run time on devices without the attribute, and how it is said so that it does not.
const (
	failingSelector   = `device.attributes["a.example.com"].model == "y"`
	patientSelector   = `device.attributes["a.example.com"].?model.orValue("") == "y"`
	failingDerivation = `device.attributes["a.example.com"].model`
	hasModel          = `"model" in device.attributes["a.example.com"]`
)

// chance is true about once in n times, and false in the simplest draw.
func chance(t *rapid.T, n int, what string) bool {
	return rapid.IntRange(0, n-1).Draw(t, what) == n-1
}

func drawWorld(t *rapid.T) *world {
	w := &world{features: drawFeatures(t)}
	for i := range rapid.SampledFrom([]int{1, 2}).Draw(t, "nodes") {
		node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", i), Labels: map[string]string{"zone": []string{"east", "west"}[i]}}}
		if chance(t, 2, "node can skip operations") {
			node.Status.DeclaredFeatures = []string{"DRAOptionalNodeOperations"}
		}
		w.nodes = append(w.nodes, node)
	}
	for i := range rapid.SampledFrom([]int{3, 2, 4, 3, 1, 5, 0}).Draw(t, "pools") {
		w.drawPool(t, i)
	}
	configured := rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "class configs")
	for i, selector := range classSelectors {
		class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("class-%d", i)}}
		class.Spec.Selectors = celSelectors(selector)
		for j := range configured {
			class.Spec.Config = append(class.Spec.Config, resourceapi.DeviceClassConfiguration{DeviceConfiguration: opaque(fmt.Sprintf("class-%d-%d", i, j))})
		}
		w.classes = append(w.classes, class)
	}
	for i := range rapid.SampledFrom([]int{1, 1, 2}).Draw(t, "claims") {
		w.claims = append(w.claims, w.drawClaim(t, i))
	}
	return w
}

// drawFeatures draws those that are on by default, rarely with one less, in half of the draws with some of alpha quality.
func drawFeatures(t *rapid.T) structured.Features {
	f := structured.Features{
		AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
		FractionalCapacityRange: true, PartitionableDevices: true, PrioritizedList: true,
	}
	alpha := rapid.SampledFrom([]int{0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 3, 5, 6, 9, 15}).Draw(t, "alpha features")
	f.ListTypeAttributes = alpha&1 != 0
	f.CompatibilityGroups = alpha&2 != 0
	f.DerivedAttributes = alpha&4 != 0
	f.OptionalNodeOperations = alpha&8 != 0
	switch rapid.SampledFrom([]int{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11}).Draw(t, "features") {
	case 5:
		f.AdminAccess = false
	case 6:
		f.ConsumableCapacity, f.FractionalCapacityRange = false, false
	case 7:
		f.DeviceBindingAndStatus = false
	case 8:
		f.DeviceTaints = false
	case 9:
		f.FractionalCapacityRange = false
	case 10:
		f.PartitionableDevices = false
	case 11:
		f.PrioritizedList = false
	}
	return f
}

func opaque(text string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: text, Parameters: runtime.RawExtension{Raw: []byte("{}")},
	}}
}

func celSelectors(expressions ...string) []resourceapi.DeviceSelector {
	var out []resourceapi.DeviceSelector
	for _, expression := range expressions {
		out = append(out, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}})
	}
	return out
}

// poolKind says what a pool's devices are like; a mixed pool has some of each.
type poolKind struct {
	// where is "node", "all", "zone" or "device": what chooses the nodes.
	where         string
	parts, shares bool
	counterSets   []resourceapi.CounterSet
}

func (w *world) drawPool(t *rapid.T, index int) {
	driver := rapid.SampledFrom([]string{driverA, driverA, driverB}).Draw(t, "driver")
	name := fmt.Sprintf("pool-%d", 9-index)
	kind := poolKind{where: rapid.SampledFrom([]string{"node", "all", "node", "all", "zone", "device", "nodes"}).Draw(t, "where")}
	switch rapid.SampledFrom([]int{0, 1, 2, 1, 2, 3}).Draw(t, "kind") {
	case 1:
		kind.parts = true
	case 2:
		kind.shares = true
	case 3:
		kind.parts, kind.shares = true, true
	}
	home := rapid.SampledFrom(w.nodes).Draw(t, "home").Name
	var slices []*resourceapi.ResourceSlice
	if kind.parts {
		for i := range rapid.SampledFrom([]int{1, 2}).Draw(t, "counter sets") {
			set := resourceapi.CounterSet{Name: fmt.Sprintf("set-%d", i), Counters: map[string]resourceapi.Counter{}}
			for j := range rapid.SampledFrom([]int{1, 2}).Draw(t, "counters") {
				set.Counters[fmt.Sprintf("counter-%d", j)] = resourceapi.Counter{Value: drawQuantity(t, "counter", "4", "3", "6", "2500m")}
			}
			kind.counterSets = append(kind.counterSets, set)
		}
		slice := w.newSlice(t, driver, kind, home)
		slice.Spec.SharedCounters = kind.counterSets
		slices = append(slices, slice)
	}
	devices := 0
	for range rapid.SampledFrom([]int{1, 1, 2}).Draw(t, "slices") {
		slice := w.newSlice(t, driver, kind, home)
		for range rapid.SampledFrom([]int{3, 2, 4, 1}).Draw(t, "devices") {
			slice.Spec.Devices = append(slice.Spec.Devices, w.drawDevice(t, &kind, devices))
			devices++
		}
		if (w.features.OptionalNodeOperations || chance(t, 10, "skips although disabled")) && chance(t, 3, "skips operations") {
			slice.Spec.SkipNodeOperations = []resourceapi.SkipNodeOperation{"*"}
		}
		if chance(t, 60, "duplicate") {
			slice.Spec.Devices[0].Name = "device-0"
		}
		slices = append(slices, slice)
	}
	generation := int64(1)
	if chance(t, 6, "outdated") {
		generation = 2
	}
	count := int64(len(slices))
	if chance(t, 40, "incomplete") {
		count++
	}
	for i, slice := range slices {
		slice.Name = fmt.Sprintf("%c-%s-%d", 'a'+rapid.IntRange(0, 25).Draw(t, "slice name"), name, i)
		slice.Spec.Pool = resourceapi.ResourcePool{Name: name, Generation: generation, ResourceSliceCount: count}
		w.slices = append(w.slices, slice)
		for j := range slice.Spec.Devices {
			w.drawHolders(t, slice, &slice.Spec.Devices[j])
		}
	}
	if generation > 1 {
		w.drawOutdated(t, driver, name, kind, home, devices)
	}
	w.held = slicesutil.DeleteFunc(w.held, func(held resourceapi.AllocationResult) bool {
		return isShareOfWhole(w.slices, &held.Devices.Results[0])
	})
}

// drawOutdated draws slices of the generation before that the driver has not deleted yet. Their devices may be called like
// some of the so many of the pool, but hold something else of the counters, or have other names.
func (w *world) drawOutdated(t *rapid.T, driver, pool string, kind poolKind, home string, devices int) {
	var outdated []*resourceapi.ResourceSlice
	slice := w.newSlice(t, driver, kind, home)
	first := rapid.SampledFrom([]int{devices, 0}).Draw(t, "first outdated device")
	for i := range rapid.SampledFrom([]int{2, 1, 3}).Draw(t, "outdated devices") {
		slice.Spec.Devices = append(slice.Spec.Devices, w.drawDevice(t, &kind, first+i))
	}
	outdated = append(outdated, slice)
	if kind.parts && !chance(t, 4, "no outdated counters") {
		slice := w.newSlice(t, driver, kind, home)
		slice.Spec.SharedCounters = kind.counterSets
		outdated = append(outdated, slice)
	}
	for i, slice := range outdated {
		slice.Name = fmt.Sprintf("%c-%s-old-%d", 'a'+rapid.IntRange(0, 25).Draw(t, "slice name"), pool, i)
		slice.Spec.Pool = resourceapi.ResourcePool{Name: pool, Generation: 1, ResourceSliceCount: int64(len(outdated))}
		w.slices = append(w.slices, slice)
	}
	if first == devices {
		for i := range slice.Spec.Devices {
			w.drawHolders(t, slice, &slice.Spec.Devices[i])
		}
	}
}

// isShareOfWhole tells whether the result is a share of a name that is, on some node, a device without shares. Upstream
// gives such a device to a request that leaves enough of its capacity, although it is held; ours does not.
func isShareOfWhole(slices []*resourceapi.ResourceSlice, result *resourceapi.DeviceRequestAllocationResult) bool {
	for _, slice := range slices {
		for i := range slice.Spec.Devices {
			device := &slice.Spec.Devices[i]
			if result.ShareID != nil && slice.Spec.Driver == result.Driver && slice.Spec.Pool.Name == result.Pool &&
				device.Name == result.Device && !ptr.Deref(device.AllowMultipleAllocations, false) {
				return true
			}
		}
	}
	return false
}

func drawQuantity(t *rapid.T, what string, from ...string) resource.Quantity {
	return resource.MustParse(rapid.SampledFrom(from).Draw(t, what))
}

func zoneSelector(t *rapid.T) *v1.NodeSelector {
	return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{{
		Key: "zone", Operator: v1.NodeSelectorOpIn, Values: []string{rapid.SampledFrom([]string{"east", "west"}).Draw(t, "target zone")},
	}}}}}
}

func (w *world) newSlice(t *rapid.T, driver string, kind poolKind, home string) *resourceapi.ResourceSlice {
	slice := &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Driver: driver}}
	switch kind.where {
	case "node":
		slice.Spec.NodeName = &home
	case "nodes":
		slice.Spec.NodeName = ptr.To(rapid.SampledFrom(w.nodes).Draw(t, "node").Name)
	case "all":
		slice.Spec.AllNodes = ptr.To(true)
	case "zone":
		slice.Spec.NodeSelector = zoneSelector(t)
	case "device":
		slice.Spec.PerDeviceNodeSelection = ptr.To(true)
	}
	return slice
}

func (w *world) drawDevice(t *rapid.T, kind *poolKind, index int) resourceapi.Device {
	device := resourceapi.Device{Name: fmt.Sprintf("device-%d", index), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}}
	if !chance(t, 12, "no model") {
		device.Attributes["model"] = resourceapi.DeviceAttribute{StringValue: ptr.To(rapid.SampledFrom([]string{"x", "y"}).Draw(t, "model"))}
	}
	if !chance(t, 12, "no numa") {
		device.Attributes["example.com/numa"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(rapid.IntRange(0, 1).Draw(t, "numa")))}
	}
	if w.features.ListTypeAttributes && rapid.Bool().Draw(t, "list of numa") {
		device.Attributes["example.com/numa"] = resourceapi.DeviceAttribute{
			IntValues: rapid.SampledFrom([][]int64{{0, 1}, {1, 0, 1}, {0}, {1, 2}, {2, 3}}).Draw(t, "numas"),
		}
	}
	switch rapid.IntRange(0, 5).Draw(t, "mixed") {
	case 0:
		device.Attributes["example.com/mixed"] = resourceapi.DeviceAttribute{VersionValue: ptr.To("1.0.0")}
	case 1:
		device.Attributes["example.com/mixed"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}
	case 2:
		device.Attributes["example.com/mixed"] = resourceapi.DeviceAttribute{StringValue: ptr.To("1.0.0")}
	case 3:
		if w.features.ListTypeAttributes || chance(t, 10, "list although disabled") {
			device.Attributes["example.com/mixed"] = resourceapi.DeviceAttribute{
				StringValues: rapid.SampledFrom([][]string{{"1.0.0", "2"}, {"2", "3"}, {"3"}}).Draw(t, "list"),
			}
		}
	}
	if kind.where == "device" {
		switch rapid.IntRange(0, 2).Draw(t, "device for") {
		case 0:
			device.NodeName = ptr.To(rapid.SampledFrom(w.nodes).Draw(t, "device's node").Name)
		case 1:
			device.NodeSelector = zoneSelector(t)
		case 2:
			device.AllNodes = ptr.To(true)
		}
	}
	if kind.parts && !chance(t, 4, "consumes nothing") {
		w.drawConsumption(t, kind, &device)
	}
	if rapid.Bool().Draw(t, "has memory") || kind.shares {
		device.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: drawQuantity(t, "memory", "4", "8", "2")}}
	}
	if kind.shares && !chance(t, 4, "not shared") {
		device.AllowMultipleAllocations = ptr.To(true)
		for name, capacity := range device.Capacity {
			capacity.RequestPolicy = drawPolicy(t)
			device.Capacity[name] = capacity
		}
		switch rapid.IntRange(0, 5).Draw(t, "more capacity") {
		case 5:
			device.Capacity = nil
		case 4:
			device.Capacity["bandwidth"] = resourceapi.DeviceCapacity{Value: drawQuantity(t, "bandwidth", "1", "3")}
		}
	}
	if chance(t, 10, "tainted") {
		device.Taints = []resourceapi.DeviceTaint{{
			Key:    rapid.SampledFrom([]string{"broken", "reserved"}).Draw(t, "taint"),
			Effect: rapid.SampledFrom([]resourceapi.DeviceTaintEffect{resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute, resourceapi.DeviceTaintEffectNone}).Draw(t, "effect"),
		}}
	}
	if chance(t, 20, "binding conditions") {
		device.BindingConditions, device.BindingFailureConditions = []string{"attached"}, []string{"gone"}
		device.BindsToNode = ptr.To(rapid.Bool().Draw(t, "binds to node"))
	}
	return device
}

func (w *world) drawConsumption(t *rapid.T, kind *poolKind, device *resourceapi.Device) {
	sets := kind.counterSets
	if len(sets) > 1 && !chance(t, 4, "consumes from both") {
		i := rapid.IntRange(0, 1).Draw(t, "counter set")
		sets = sets[i : i+1]
	}
	for _, set := range sets {
		consumption := resourceapi.DeviceCounterConsumption{CounterSet: set.Name, Counters: map[string]resourceapi.Counter{}}
		for j := range len(set.Counters) {
			consumption.Counters[fmt.Sprintf("counter-%d", j)] = resourceapi.Counter{Value: drawQuantity(t, "consumes", "1", "2", "500m", "4", "0")}
		}
		if w.features.CompatibilityGroups || chance(t, 60, "groups although disabled") {
			consumption.CompatibilityGroups = rapid.SampledFrom([][]string{nil, {"a"}, {"a", "b"}, {"b"}}).Draw(t, "groups")
		}
		device.ConsumesCounters = append(device.ConsumesCounters, consumption)
	}
}

func drawPolicy(t *rapid.T) *resourceapi.CapacityRequestPolicy {
	quantity := func(text string) *resource.Quantity { return ptr.To(resource.MustParse(text)) }
	switch rapid.IntRange(0, 6).Draw(t, "policy") {
	case 1:
		return &resourceapi.CapacityRequestPolicy{Default: quantity("1"), ValidValues: []resource.Quantity{*quantity("1"), *quantity("2"), *quantity("4")}}
	case 2:
		return &resourceapi.CapacityRequestPolicy{Default: quantity("1"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity("1"), Max: quantity("3")}}
	case 3:
		return &resourceapi.CapacityRequestPolicy{Default: quantity("2"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity("1"), Step: quantity("1")}}
	case 4:
		return &resourceapi.CapacityRequestPolicy{Default: quantity("500m"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity("500m"), Step: quantity("250m"), Max: quantity("2")}}
	case 5:
		return &resourceapi.CapacityRequestPolicy{Default: quantity("0"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity("0")}}
	case 6:
		return &resourceapi.CapacityRequestPolicy{Default: quantity("1")}
	}
	return nil
}

func (w *world) drawHolders(t *rapid.T, slice *resourceapi.ResourceSlice, device *resourceapi.Device) {
	hold := func(share *types.UID, consumed map[resourceapi.QualifiedName]resource.Quantity) {
		w.held = append(w.held, resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
			Request: "r", Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name, Device: device.Name, ShareID: share, ConsumedCapacity: consumed,
		}}}})
	}
	if !w.features.ConsumableCapacity || !ptr.Deref(device.AllowMultipleAllocations, false) || chance(t, 12, "held alone") {
		if chance(t, 5, "held") {
			hold(nil, nil)
		}
		return
	}
	for range rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "shares") {
		var consumed map[resourceapi.QualifiedName]resource.Quantity
		for name := range device.Capacity {
			if consumed == nil {
				consumed = make(map[resourceapi.QualifiedName]resource.Quantity)
			}
			consumed[name] = drawQuantity(t, "consumed", "1", "0", "2", "500m")
		}
		hold(ptr.To(types.UID(fmt.Sprintf("share-%d", len(w.held)))), consumed)
	}
}

func (w *world) drawClaim(t *rapid.T, index int) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: fmt.Sprintf("claim-%d", index), UID: types.UID(fmt.Sprintf("uid-%d", index)),
	}}
	var names []string
	for i := range rapid.SampledFrom([]int{1, 1, 2, 3}).Draw(t, "requests") {
		request := resourceapi.DeviceRequest{Name: fmt.Sprintf("request-%d", i)}
		names = append(names, request.Name)
		if chance(t, 4, "prioritized") {
			for j := range rapid.SampledFrom([]int{2, 1, 3, 2, 1, 8}).Draw(t, "alternatives") {
				d := w.drawRequest(t)
				sub := resourceapi.DeviceSubRequest{
					Name: fmt.Sprintf("sub-%d", j), DeviceClassName: d.DeviceClassName, Selectors: d.Selectors, AllocationMode: d.AllocationMode,
					Count: d.Count, Tolerations: d.Tolerations, Capacity: d.Capacity, DerivedAttributes: d.DerivedAttributes,
				}
				names = append(names, request.Name+"/"+sub.Name)
				request.FirstAvailable = append(request.FirstAvailable, sub)
			}
		} else {
			request.Exactly = w.drawRequest(t)
			if chance(t, 8, "admin") {
				request.Exactly.AdminAccess = ptr.To(true)
			}
		}
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, request)
	}
	some := rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, len(names), rapid.ID[string])
	for range rapid.SampledFrom([]int{0, 0, 0, 1, 1, 2}).Draw(t, "constraints") {
		attribute := ptr.To(rapid.SampledFrom(attributeNames).Draw(t, "attribute"))
		constraint := resourceapi.DeviceConstraint{Requests: some.Draw(t, "constrained")}
		if chance(t, 3, "distinct") {
			constraint.DistinctAttribute = attribute
		} else {
			constraint.MatchAttribute = attribute
		}
		claim.Spec.Devices.Constraints = append(claim.Spec.Devices.Constraints, constraint)
	}
	for i := range rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "claim configs") {
		claim.Spec.Devices.Config = append(claim.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{
			Requests: some.Draw(t, "configured"), DeviceConfiguration: opaque(fmt.Sprintf("claim-%d-%d", index, i)),
		})
	}
	return claim
}

func (w *world) drawRequest(t *rapid.T) *resourceapi.ExactDeviceRequest {
	r := &resourceapi.ExactDeviceRequest{
		DeviceClassName: fmt.Sprintf("class-%d", rapid.SampledFrom([]int{0, 1, 0, 1, 0, 2, 0, 3, 0, 1, 0, 0, 1, 4}).Draw(t, "class")),
		AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
		Count:           int64(rapid.SampledFrom([]int{1, 1, 1, 2, 1, 2, 3}).Draw(t, "count")),
	}
	if chance(t, 12, "all") {
		r.AllocationMode, r.Count = resourceapi.DeviceAllocationModeAll, 0
	}
	if chance(t, 6, "selected") {
		r.Selectors = celSelectors(rapid.SampledFrom(requestSelectors).Draw(t, "selector"))
	}
	if chance(t, 4, "tolerates") {
		r.Tolerations = []resourceapi.DeviceToleration{{
			Key: rapid.SampledFrom([]string{"", "broken", "reserved"}).Draw(t, "tolerated"), Operator: resourceapi.DeviceTolerationOpExists,
			Effect: rapid.SampledFrom([]resourceapi.DeviceTaintEffect{"", resourceapi.DeviceTaintEffectNoSchedule}).Draw(t, "tolerated effect"),
		}}
	}
	if chance(t, 6, "capacity") {
		name := rapid.SampledFrom([]resourceapi.QualifiedName{"memory", "memory", "bandwidth"}).Draw(t, "capacity name")
		r.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
			name: drawQuantity(t, "wants", "1", "2", "1500m", "3", "0", "5"),
		}}
	}
	if w.features.DerivedAttributes && chance(t, 2, "derives") {
		r.DerivedAttributes = []resourceapi.DeviceDerivedAttribute{{
			Name:       rapid.SampledFrom(attributeNames).Draw(t, "derived"),
			Expression: rapid.SampledFrom(derivations).Draw(t, "expression"),
		}}
	}
	return r
}

// allocated is what is held in upstream's form.
func (w *world) allocated() structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for i := range w.held {
		for _, result := range w.held[i].Devices.Results {
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			if result.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
			if result.ConsumedCapacity != nil {
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
			}
		}
	}
	return state
}

// cluster is the world as the checker sees it from one node.
func (w *world) cluster(node *v1.Node) checker.Cluster {
	return checker.Cluster{Node: node, Slices: w.slices, Classes: w.classes, Held: w.held, Features: w.features}
}

// caches for the expressions of upstream's allocators, by what the features make of them.
var celCaches = map[cel.Features]*cel.Cache{}

// upstream returns a new allocator of upstream's.
func (w *world) upstream(t interface{ Fatalf(string, ...any) }) structured.Allocator {
	return w.allocator(t, structured.NewAllocator)
}

// ours returns a new one of ours.
func (w *world) ours(t interface{ Fatalf(string, ...any) }) *firstFit {
	return w.allocator(t, NewAllocator).(*firstFit)
}

func (w *world) allocator(t interface{ Fatalf(string, ...any) }, create newAllocator) structured.Allocator {
	key := cel.Features{EnableConsumableCapacity: w.features.ConsumableCapacity, EnableListTypeAttributes: w.features.ListTypeAttributes}
	if celCaches[key] == nil {
		celCaches[key] = cel.NewCache(1000, key)
	}
	a, err := create(context.Background(), w.features, w.allocated(), classLister(w.classes), w.slices, celCaches[key])
	if err != nil {
		t.Fatalf("no allocator: %v", err)
	}
	return a
}

type newAllocator func(context.Context, structured.Features, structured.AllocatedState, structured.DeviceClassLister,
	[]*resourceapi.ResourceSlice, *cel.Cache) (structured.Allocator, error)

// dump prints everything for the failure of one node.
func (w *world) dump(node *v1.Node) string {
	text := fmt.Sprintf("--- features\n%v\n--- node\nname: %s\nlabels: %v\n", sets.List(w.features.Set()), node.Name, node.Labels)
	for _, slice := range w.slices {
		text += "--- slice\n" + toYAML(slice)
	}
	for i := range w.held {
		text += "--- held\n" + toYAML(w.held[i].Devices.Results)
	}
	for _, claim := range w.claims {
		text += "--- claim\n" + toYAML(claim.Spec)
	}
	return text
}

func toYAML(v any) string {
	data, err := yaml.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

type classLister []*resourceapi.DeviceClass

func (l classLister) List() ([]*resourceapi.DeviceClass, error) { return l, nil }

func (l classLister) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range l {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, apierrors.NewNotFound(resourceapi.Resource("deviceclasses"), name)
}
