// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/allocator/internal/checker"
	"stowage.dev/stowage/pkg/allocator/internal/evaluation"
	"stowage.dev/stowage/pkg/allocator/internal/search"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// world is one random cluster with the claims of one pod.
type world struct {
	nodes   []*v1.Node
	slices  []*resourceapi.ResourceSlice
	classes []*resourceapi.DeviceClass
	held    []usage.DeviceID
	shares  []resourceapi.DeviceRequestAllocationResult // held, too
	claims  []*resourceapi.ResourceClaim

	features func(*inventory.Features) // changes the default
}

const (
	driverA = "a.example.com"
	driverB = "b.example.com"
)

var selectors = []string{
	`true`,
	`device.driver == "a.example.com"`,
	`device.driver == "b.example.com"`,
	`device.attributes["a.example.com"].?model.orValue("") == "x"`,
	`device.capacity["a.example.com"].?memory.orValue(quantity("0")).compareTo(quantity("20Gi")) >= 0`,
	// Fails at run time on devices without the attribute.
	`device.attributes["a.example.com"].model == "y"`,
}

func drawWorld(t *rapid.T) *world {
	w := &world{}
	for i := range rapid.IntRange(1, 3).Draw(t, "nodes") {
		w.nodes = append(w.nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("node-%d", i), Labels: map[string]string{"zone": rapid.SampledFrom([]string{"east", "west"}).Draw(t, "zone")},
		}})
	}
	for i := range rapid.SampledFrom([]int{3, 4, 5, 2, 6, 1, 0}).Draw(t, "pools") {
		w.drawPool(t, i)
	}
	for i, selector := range selectors {
		class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("class-%d", i)}}
		class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: selector}}}
		for j := range rapid.IntRange(0, 2).Draw(t, "class configs") {
			class.Spec.Config = append(class.Spec.Config, resourceapi.DeviceClassConfiguration{DeviceConfiguration: config(fmt.Sprintf("class-%d-%d", i, j))})
		}
		w.classes = append(w.classes, class)
	}
	for i := range rapid.SampledFrom([]int{1, 1, 2, 3}).Draw(t, "claims") {
		w.claims = append(w.claims, drawClaim(t, i))
	}
	return w
}

// drawTightWorld draws one node whose few devices barely suffice, or do not, so that the first attempt often leads
// into a dead end.
func drawTightWorld(t *rapid.T) *world { return drawTight(t, []int{5, 6, 4, 7, 3}, 8) }

// drawAdminWorld is the same with more devices and much admin access.
func drawAdminWorld(t *rapid.T) *world { return drawTight(t, []int{7, 8, 9, 6, 5}, 4) }

// drawTight draws one node with one of those numbers of devices. Of the ten kinds of requests those from the given one on,
// but the last, have admin access.
func drawTight(t *rapid.T, numbers []int, admin int) *world {
	w := rig()
	w.classes[0].Spec.Selectors = nil // selectors fail on attributes of unknown kinds
	var devices []resourceapi.Device
	for i := range rapid.SampledFrom(numbers).Draw(t, "devices") {
		device := resourceapi.Device{Name: fmt.Sprintf("device-%d", i), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"example.com/numa": {IntValue: ptr.To(int64(rapid.IntRange(0, 2).Draw(t, "numa")))},
			"example.com/link": {StringValue: ptr.To(rapid.SampledFrom([]string{"a", "b"}).Draw(t, "link"))},
		}}
		if rapid.IntRange(0, 9).Draw(t, "unknown kind") == 9 {
			device.Attributes["example.com/link"] = resourceapi.DeviceAttribute{IntValues: []int64{1}}
		}
		devices = append(devices, device)
	}
	w.node("node", devices...)
	count := func(label string) int64 { return int64(rapid.SampledFrom([]int{1, 2, 1, 3}).Draw(t, label)) }
	for i := range rapid.SampledFrom([]int{2, 1, 3}).Draw(t, "claims") {
		var requests []resourceapi.DeviceRequest
		var names []string
		for j := range rapid.SampledFrom([]int{2, 1, 3}).Draw(t, "requests") {
			request := exactly(fmt.Sprintf("request-%d", j), count("count"))
			if rapid.IntRange(0, 3).Draw(t, "picky") == 3 {
				request.Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
					Expression: fmt.Sprintf(`device.attributes["example.com"].numa != %d`, rapid.IntRange(0, 2).Draw(t, "not numa")),
				}}}
			}
			switch kind := rapid.IntRange(0, 9).Draw(t, "kind of request"); {
			case kind >= admin && kind < 9:
				request.Exactly.AdminAccess = ptr.To(true)
			case kind == 9:
				request.FirstAvailable = []resourceapi.DeviceSubRequest{
					{Name: "a", DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count("first")},
					{Name: "b", DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count("second")},
				}
				request.Exactly = nil
			}
			requests = append(requests, request)
			names = append(names, request.Name)
		}
		w.claim(fmt.Sprintf("claim-%d", i), requests...)
		claim := w.claims[len(w.claims)-1]
		for range rapid.SampledFrom([]int{1, 0, 2}).Draw(t, "constraints") {
			constraint := resourceapi.DeviceConstraint{Requests: rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, len(names), rapid.ID[string]).Draw(t, "constrained")}
			attribute := ptr.To(resourceapi.FullyQualifiedName(rapid.SampledFrom([]string{"example.com/numa", "example.com/link"}).Draw(t, "attribute")))
			if rapid.IntRange(0, 2).Draw(t, "distinct") == 2 {
				constraint.DistinctAttribute = attribute
			} else {
				constraint.MatchAttribute = attribute
			}
			claim.Spec.Devices.Constraints = append(claim.Spec.Devices.Constraints, constraint)
		}
	}
	return w
}

// drawSharingWorld draws one node with a few GPUs that are alike or nearly so, cut into partitions or shared, and requests
// that barely fit, or do not.
func drawSharingWorld(t *rapid.T) *world {
	w := rig()
	few := rapid.SampledFrom([]int{2, 1, 2, 3})
	amounts := rapid.SampledFrom([]string{"1", "2", "3", "4", "500m"})
	var devices []resourceapi.Device
	interleaved := rapid.Bool().Draw(t, "interleaved")
	gpus, sets := few.Draw(t, "gpus"), 0
	var shape []resourceapi.Device
	consumes := func(gpu, set int, counter, quantity string) resourceapi.DeviceCounterConsumption {
		return resourceapi.DeviceCounterConsumption{CounterSet: fmt.Sprintf("gpu-%d-%d", gpu, set), Counters: map[string]resourceapi.Counter{
			counter: {Value: resource.MustParse(quantity)},
		}}
	}
	type consumption struct {
		set               int
		counter, quantity string
	}
	var uses [][]consumption
	sets = rapid.SampledFrom([]int{1, 1, 2}).Draw(t, "counter sets")
	for range rapid.SampledFrom([]int{3, 2, 4, 1}).Draw(t, "devices") {
		device := resourceapi.Device{Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"example.com/numa": {IntValue: ptr.To(int64(rapid.IntRange(0, 1).Draw(t, "numa")))},
		}}
		if rapid.IntRange(0, 2).Draw(t, "shareable") == 0 {
			device.AllowMultipleAllocations = ptr.To(true)
			if rapid.IntRange(0, 3).Draw(t, "has capacity") > 0 {
				device.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse(amounts.Draw(t, "memory"))}}
			}
		}
		var own []consumption
		for set := range sets {
			if rapid.IntRange(0, 3).Draw(t, "consumes") > 0 {
				own = append(own, consumption{set, rapid.SampledFrom([]string{"x", "x", "y"}).Draw(t, "counter"), amounts.Draw(t, "use")})
			}
		}
		uses = append(uses, own)
		shape = append(shape, device)
	}
	for i := range gpus * len(shape) {
		gpu, k := i/len(shape), i%len(shape)
		if interleaved {
			gpu, k = i%gpus, i/gpus
		}
		device := *shape[k].DeepCopy()
		device.Name = fmt.Sprintf("device-%d", i)
		device.Attributes["example.com/gpu"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(gpu))}
		if rapid.IntRange(0, 9).Draw(t, "differs") == 0 {
			device.Attributes["example.com/numa"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(2))}
		}
		for _, u := range uses[k] {
			device.ConsumesCounters = append(device.ConsumesCounters, consumes(gpu, u.set, u.counter, u.quantity))
		}
		devices = append(devices, device)
	}
	w.node("node", devices...)
	slice := w.slices[0].DeepCopy()
	slice.Name, slice.Spec.Devices = "counters", nil
	for gpu := range gpus {
		for set := range sets {
			slice.Spec.SharedCounters = append(slice.Spec.SharedCounters, resourceapi.CounterSet{Name: fmt.Sprintf("gpu-%d-%d", gpu, set), Counters: map[string]resourceapi.Counter{
				"x": {Value: resource.MustParse("4")}, "y": {Value: resource.MustParse("3")},
			}})
		}
	}
	w.slices = append(w.slices, slice)
	w.recount("node")
	for i := range devices {
		if rapid.IntRange(0, 5).Draw(t, "held") > 0 {
			continue
		}
		id := usage.DeviceID{Driver: driverA, Pool: "node", Device: devices[i].Name}
		if devices[i].AllowMultipleAllocations == nil {
			w.held = append(w.held, id)
			continue
		}
		share := resourceapi.DeviceRequestAllocationResult{Driver: id.Driver, Pool: id.Pool, Device: id.Device, ShareID: ptr.To(types.UID("share"))}
		if devices[i].Capacity != nil {
			share.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("500m")}
		}
		w.shares = append(w.shares, share)
	}
	for i := range rapid.SampledFrom([]int{1, 2, 1}).Draw(t, "claims") {
		w.drawSharingClaim(t, fmt.Sprintf("claim-%d", i))
	}
	return w
}

func (w *world) drawSharingClaim(t *rapid.T, name string) {
	details := func(name string) resourceapi.DeviceRequest {
		request := exactly(name, int64(rapid.SampledFrom([]int{1, 2, 1, 3}).Draw(t, "count")))
		if rapid.IntRange(0, 2).Draw(t, "picky") == 2 {
			request = exactly(name, request.Exactly.Count, fmt.Sprintf(`device.attributes["example.com"].numa != %d`, rapid.IntRange(0, 2).Draw(t, "not numa")))
		}
		switch rapid.IntRange(0, 9).Draw(t, "capacity") {
		case 0, 1, 2, 3, 4:
			request.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
				"memory": resource.MustParse(rapid.SampledFrom([]string{"1", "500m", "2", "0"}).Draw(t, "required")),
			}}
			if rapid.Bool().Draw(t, "only shareable") {
				request.Exactly.Selectors = append(request.Exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: "device.allowMultipleAllocations"}})
			}
		case 5:
			request = all(name)
		}
		return request
	}
	var requests []resourceapi.DeviceRequest
	var names []string
	for i := range rapid.SampledFrom([]int{2, 1, 3, 4}).Draw(t, "requests") {
		name := fmt.Sprintf("request-%d", i)
		names = append(names, name)
		switch rapid.IntRange(0, 9).Draw(t, "kind of request") {
		case 7, 8:
			requests = append(requests, firstOf(name, details("a"), details("b")))
		case 9:
			if request := details(name); request.Exactly.Count > 0 {
				requests = append(requests, adminAccess(request))
				continue
			}
			requests = append(requests, details(name))
		case 0, 1:
			if i > 0 && requests[i-1].Exactly != nil {
				twin := *requests[i-1].DeepCopy()
				twin.Name = name
				requests = append(requests, twin)
				continue
			}
			requests = append(requests, details(name))
		default:
			requests = append(requests, details(name))
		}
	}
	w.claim(name, requests...)
	claim := w.claims[len(w.claims)-1]
	for range rapid.SampledFrom([]int{0, 1, 0, 2}).Draw(t, "constraints") {
		constraint := resourceapi.DeviceConstraint{Requests: rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, len(names), rapid.ID[string]).Draw(t, "constrained")}
		attribute := ptr.To(resourceapi.FullyQualifiedName(rapid.SampledFrom([]string{"example.com/numa", "example.com/gpu"}).Draw(t, "attribute")))
		if rapid.IntRange(0, 2).Draw(t, "distinct") == 2 {
			constraint.DistinctAttribute = attribute
		} else {
			constraint.MatchAttribute = attribute
		}
		claim.Spec.Devices.Constraints = append(claim.Spec.Devices.Constraints, constraint)
	}
}

func config(text string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: text}}
}

func (w *world) drawPool(t *rapid.T, index int) {
	driver := rapid.SampledFrom([]string{driverA, driverA, driverB}).Draw(t, "driver")
	name := fmt.Sprintf("pool-%d", 9-index)
	kind := rapid.SampledFrom([]string{"local", "all", "local", "zone", "local", "device", "spread"}).Draw(t, "kind")
	home := rapid.SampledFrom(w.nodes).Draw(t, "home").Name
	count := rapid.SampledFrom([]int{2, 3, 1}).Draw(t, "slices")
	declared := int64(count)
	if rapid.IntRange(0, 29).Draw(t, "incomplete") == 29 {
		declared++
	}
	generation := int64(1)
	if rapid.IntRange(0, 9).Draw(t, "outdated") == 9 {
		old := w.drawSlice(t, driver, name, kind, home, 90, 0)
		old.Spec.Pool = resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1}
		w.slices = append(w.slices, old)
		generation++
	}
	device := 0
	for i := range count {
		slice := w.drawSlice(t, driver, name, kind, home, i, device)
		device += len(slice.Spec.Devices)
		if len(slice.Spec.Devices) > 0 && rapid.IntRange(0, 39).Draw(t, "duplicate") == 39 {
			slice.Spec.Devices[0].Name = "device-0"
		}
		slice.Spec.Pool = resourceapi.ResourcePool{Name: name, Generation: generation, ResourceSliceCount: declared}
		w.slices = append(w.slices, slice)
		for _, d := range slice.Spec.Devices {
			if rapid.IntRange(0, 4).Draw(t, "held") >= 3 {
				w.held = append(w.held, usage.DeviceID{Driver: driver, Pool: name, Device: d.Name})
			}
		}
	}
}

func (w *world) drawSlice(t *rapid.T, driver, pool, kind, home string, index, firstDevice int) *resourceapi.ResourceSlice {
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{
		Name: fmt.Sprintf("%c-%s-%d", 'a'+rapid.IntRange(0, 25).Draw(t, "slice name"), pool, index),
	}}
	slice.Spec.Driver = driver
	zone := &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{{
		Key: "zone", Operator: v1.NodeSelectorOpIn, Values: []string{rapid.SampledFrom([]string{"east", "west"}).Draw(t, "target zone")},
	}}}}}
	someNode := func() *string { return ptr.To(rapid.SampledFrom(w.nodes).Draw(t, "node").Name) }
	switch kind {
	case "local":
		slice.Spec.NodeName = ptr.To(home)
	case "spread":
		slice.Spec.NodeName = someNode()
	case "all":
		slice.Spec.AllNodes = ptr.To(true)
	case "zone":
		slice.Spec.NodeSelector = zone
	case "device":
		slice.Spec.PerDeviceNodeSelection = ptr.To(true)
	}
	for i := range rapid.SampledFrom([]int{3, 4, 5, 2, 1, 6, 0}).Draw(t, "devices") {
		device := drawDevice(t, firstDevice+i)
		if kind == "device" {
			switch rapid.IntRange(0, 2).Draw(t, "device for") {
			case 0:
				device.NodeName = someNode()
			case 1:
				device.NodeSelector = zone
			case 2:
				device.AllNodes = ptr.To(true)
			}
		}
		slice.Spec.Devices = append(slice.Spec.Devices, device)
	}
	return slice
}

func drawDevice(t *rapid.T, index int) resourceapi.Device {
	device := resourceapi.Device{Name: fmt.Sprintf("device-%d", index), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}}
	if rapid.IntRange(0, 9).Draw(t, "has model") < 9 {
		device.Attributes["model"] = resourceapi.DeviceAttribute{StringValue: ptr.To(rapid.SampledFrom([]string{"x", "y"}).Draw(t, "model"))}
	}
	if rapid.IntRange(0, 9).Draw(t, "has numa") < 9 {
		device.Attributes["example.com/numa"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(rapid.IntRange(0, 2).Draw(t, "numa")))}
	}
	switch rapid.IntRange(0, 3).Draw(t, "kind of version") {
	case 0:
		device.Attributes["example.com/mixed"] = resourceapi.DeviceAttribute{VersionValue: ptr.To("1.0.0")}
	case 1:
		device.Attributes["example.com/mixed"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(rapid.Bool().Draw(t, "bool"))}
	case 2:
		device.Attributes["example.com/mixed"] = resourceapi.DeviceAttribute{StringValue: ptr.To("1.0.0")}
	}
	device.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		"memory": {Value: resource.MustParse(rapid.SampledFrom([]string{"10Gi", "20Gi", "40Gi"}).Draw(t, "memory"))},
	}
	if rapid.IntRange(0, 5).Draw(t, "tainted") == 5 {
		device.Taints = []resourceapi.DeviceTaint{{
			Key:    rapid.SampledFrom([]string{"broken", "reserved"}).Draw(t, "taint"),
			Effect: rapid.SampledFrom([]resourceapi.DeviceTaintEffect{resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute, resourceapi.DeviceTaintEffectNone}).Draw(t, "effect"),
		}}
	}
	if rapid.IntRange(0, 19).Draw(t, "binding conditions") == 19 {
		device.BindingConditions = []string{"attached"}
		device.BindingFailureConditions = []string{"gone"}
		device.BindsToNode = ptr.To(rapid.Bool().Draw(t, "binds to node"))
	}
	return device
}

func drawClaim(t *rapid.T, index int) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: fmt.Sprintf("claim-%d", index), UID: types.UID(fmt.Sprintf("uid-%d", index)),
	}}
	var names []string
	for i := range rapid.SampledFrom([]int{1, 1, 2, 3}).Draw(t, "requests") {
		request := resourceapi.DeviceRequest{Name: fmt.Sprintf("request-%d", i)}
		names = append(names, request.Name)
		if rapid.IntRange(0, 3).Draw(t, "prioritized") == 3 {
			for j := range rapid.IntRange(1, 3).Draw(t, "alternatives") {
				d := drawDetails(t)
				sub := resourceapi.DeviceSubRequest{
					Name: fmt.Sprintf("sub-%d", j), DeviceClassName: d.class, Selectors: celSelectors(d.selectors),
					AllocationMode: d.mode, Count: d.count, Tolerations: d.tolerations,
				}
				names = append(names, request.Name+"/"+sub.Name)
				request.FirstAvailable = append(request.FirstAvailable, sub)
			}
		} else {
			d := drawDetails(t)
			request.Exactly = &resourceapi.ExactDeviceRequest{
				DeviceClassName: d.class, Selectors: celSelectors(d.selectors), AllocationMode: d.mode, Count: d.count, Tolerations: d.tolerations,
			}
			if rapid.IntRange(0, 5).Draw(t, "admin") == 5 {
				request.Exactly.AdminAccess = ptr.To(rapid.IntRange(0, 3).Draw(t, "admin access") < 3)
			}
		}
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, request)
	}
	some := rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, len(names), rapid.ID[string])
	for range rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "constraints") {
		attribute := ptr.To(resourceapi.FullyQualifiedName(rapid.SampledFrom([]string{driverA + "/model", "example.com/numa", "example.com/mixed"}).Draw(t, "attribute")))
		constraint := resourceapi.DeviceConstraint{Requests: some.Draw(t, "constrained")}
		if rapid.IntRange(0, 2).Draw(t, "distinct") == 2 {
			constraint.DistinctAttribute = attribute
		} else {
			constraint.MatchAttribute = attribute
		}
		claim.Spec.Devices.Constraints = append(claim.Spec.Devices.Constraints, constraint)
	}
	for i := range rapid.IntRange(0, 2).Draw(t, "claim configs") {
		claim.Spec.Devices.Config = append(claim.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{
			Requests: some.Draw(t, "configured"), DeviceConfiguration: config(fmt.Sprintf("claim-%d-%d", index, i)),
		})
	}
	return claim
}

// drawn is what exact requests and subrequests have alike.
type drawn struct {
	class       string
	mode        resourceapi.DeviceAllocationMode
	count       int64
	selectors   []resourceapi.DeviceSelector
	tolerations []resourceapi.DeviceToleration
}

func drawDetails(t *rapid.T) drawn {
	d := drawn{
		class: fmt.Sprintf("class-%d", rapid.SampledFrom([]int{0, 1, 0, 1, 0, 1, 3, 4, 2, 0, 1, 4, 3, 5}).Draw(t, "class")),
		mode:  resourceapi.DeviceAllocationModeExactCount,
		count: int64(rapid.SampledFrom([]int{1, 1, 1, 2, 2, 3, 4}).Draw(t, "count")),
	}
	if rapid.IntRange(0, 9).Draw(t, "all") == 9 {
		d.mode, d.count = resourceapi.DeviceAllocationModeAll, 0
	}
	for range rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(t, "selectors") {
		d.selectors = append(d.selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{
			Expression: rapid.SampledFrom(selectors[:5]).Draw(t, "selector"),
		}})
	}
	if rapid.IntRange(0, 2).Draw(t, "tolerates") == 0 {
		d.tolerations = []resourceapi.DeviceToleration{{
			Key: rapid.SampledFrom([]string{"", "broken", "reserved"}).Draw(t, "tolerated"), Operator: resourceapi.DeviceTolerationOpExists,
			Effect: rapid.SampledFrom([]resourceapi.DeviceTaintEffect{"", resourceapi.DeviceTaintEffectNoSchedule}).Draw(t, "tolerated effect"),
		}}
	}
	return d
}

func celSelectors(selectors []resourceapi.DeviceSelector) []resourceapi.DeviceSelector {
	return slices.Clone(selectors)
}

// store returns an inventory with the world's slices, set in the given order, and classes.
func (w *world) store() *inventory.Store {
	features := inventory.DefaultFeatures()
	if w.features != nil {
		w.features(&features)
	}
	store := inventory.NewStore(inventory.Options{Features: features})
	for _, slice := range w.slices {
		store.SetSlice(slice)
	}
	for _, class := range w.classes {
		store.SetClass(class)
	}
	return store
}

// usage returns a view in which the world's held devices have one holder each.
func (w *world) usage() usage.View {
	index := usage.NewIndex()
	for i, id := range w.held {
		index.Set(usage.ClaimRef{UID: types.UID(fmt.Sprintf("holder-%d", i))}, &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: "r", Driver: id.Driver, Pool: id.Pool, Device: id.Device,
			}}},
		}, nil)
	}
	for i, share := range w.shares {
		index.Set(usage.ClaimRef{UID: types.UID(fmt.Sprintf("sharer-%d", i))}, &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{share}},
		}, nil)
	}
	return index.View()
}

// cluster is the world as the checker sees it from the node.
func (w *world) cluster(node *v1.Node) checker.Cluster {
	cluster := checker.Cluster{Node: node, Slices: w.slices, Classes: w.classes, Features: upstreamFeatures}
	held := func(result resourceapi.DeviceRequestAllocationResult) {
		cluster.Held = append(cluster.Held, resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}},
		})
	}
	for _, id := range w.held {
		held(resourceapi.DeviceRequestAllocationResult{Driver: id.Driver, Pool: id.Pool, Device: id.Device})
	}
	for _, share := range w.shares {
		held(share)
	}
	return cluster
}

// classLister serves upstream's allocator.
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

// searchOf is the search of a node's devices.
func (in *Input) searchOf(ctx context.Context, devices *inventory.NodeDevices) *search.Search {
	in.evaluator = evaluation.Evaluator{Ctx: ctx, Attempt: in.Attempt}
	return search.New(in.search(), devices, in.stateOf)
}
