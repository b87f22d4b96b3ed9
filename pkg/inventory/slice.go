// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// Slice is one ResourceSlice with what is derived from it. Immutable but for its caches.
type Slice struct {
	// Object is the slice with all DeviceTaintRules applied. Read only.
	Object *resourceapi.ResourceSlice

	rule      nodeRule
	perDevice []nodeRule // one per device if the devices choose their nodes, otherwise nil
	// tainted are the devices with a taint that can prevent allocation, whatever tolerations say; nil if none.
	tainted bitset.Set
	// bindingConditions tells whether any device has some, which puts the pool behind all others.
	bindingConditions bool
	// consumers are the devices that consume counters; nil if none.
	consumers bitset.Set
	// unaccounted are the devices that stand for CPU or memory of a node; nil if none, or if that is accounted for.
	unaccounted bitset.Set
	// shareable are the devices that allow multiple allocations, and capacities what they have to give, by
	// device; nil if none, or if the feature is off.
	shareable  bitset.Set
	capacities []*Capacity
	// apart are those of the shareable devices whose shares are one namespace's; nil if none.
	apart bitset.Set
	// picky are the devices that may be unable to serve a request without capacity requirements; nil if none, or
	// if the feature is off.
	picky bitset.Set
	// problem is what is wrong with the slice, which makes its pool invalid; empty if nothing is.
	problem string
	// ignored is why the slice does not count, as if it were not there; empty if it counts.
	ignored string

	// skipsOperations tells that the slice's devices skip node operations, and that this matters.
	skipsOperations bool

	// notes say which of an expression's results is the slice's, results are those that have no number.
	notes   notes
	results slots[exprResult]
	derived slots[derivedResult]
}

func newSlice(object *resourceapi.ResourceSlice, features Features) *Slice {
	s := &Slice{Object: object, skipsOperations: len(object.Spec.SkipNodeOperations) > 0 && features.mindsNodeOperations()}
	spec := &object.Spec
	if !features.CompatibilityGroups && usesCompatibilityGroups(object) {
		s.ignored = "uses compatibility groups, which are not enabled"
	}
	if !features.PartitionableDevices && (spec.PerDeviceNodeSelection != nil || len(spec.SharedCounters) > 0) {
		return s // for no node
	}
	var err error
	if err = checkValues(spec); err != nil {
		s.problem = fmt.Sprintf("slice %s: %v", object.Name, err)
	}
	if s.rule, err = newNodeRule(spec.NodeName, spec.AllNodes, spec.NodeSelector); err != nil && s.problem == "" {
		s.problem = fmt.Sprintf("slice %s: nodeSelector: %v", object.Name, err)
	}
	if s.rule.kind == ruleNone && ptr.Deref(spec.PerDeviceNodeSelection, false) {
		s.perDevice = make([]nodeRule, len(spec.Devices))
	}
	for i := range spec.Devices {
		device := &spec.Devices[i]
		if s.perDevice != nil {
			if s.perDevice[i], err = newNodeRule(device.NodeName, device.AllNodes, device.NodeSelector); err != nil && s.problem == "" {
				s.problem = fmt.Sprintf("slice %s, device %s: nodeSelector: %v", object.Name, device.Name, err)
			}
		}
		if hasEffectiveTaint(device) {
			s.tainted = addDevice(s.tainted, i, len(spec.Devices))
		}
		if len(device.ConsumesCounters) > 0 {
			s.consumers = addDevice(s.consumers, i, len(spec.Devices))
		}
		if len(device.NodeAllocatableResources) > 0 && !features.NodeAllocatableResources {
			s.unaccounted = addDevice(s.unaccounted, i, len(spec.Devices))
		}
		if features.ConsumableCapacity {
			s.learnCapacity(device, i)
		}
		if device.BindingConditions != nil {
			s.bindingConditions = true
		}
	}
	return s
}

// learnCapacity notes what matters about the capacity of device i.
func (s *Slice) learnCapacity(device *resourceapi.Device, i int) {
	n := len(s.Object.Spec.Devices)
	if needsCapacityCheck(device) {
		s.picky = addDevice(s.picky, i, n)
	}
	if !ptr.Deref(device.AllowMultipleAllocations, false) {
		return
	}
	s.shareable = addDevice(s.shareable, i, n)
	if s.capacities == nil {
		s.capacities = make([]*Capacity, n)
	}
	s.capacities[i] = capacityOf(device)
	if IsApart(s.Object.Spec.Driver, device) {
		s.apart = addDevice(s.apart, i, n)
	}
}

// The node agent's driver, and the attribute, true where a device's shares are one namespace's: there the agent prepares no share for a
// claim while claims of another namespace have one. What other drivers publish under the name means nothing here.
const (
	ownDriver      = "gpu.nvidia.com"
	attributeApart = "sharedByNamespace"
)

// IsApart tells whether the device of the driver is one whose shares the node gives to one namespace at a time.
func IsApart(driver string, device *resourceapi.Device) bool {
	if driver != ownDriver || !ptr.Deref(device.AllowMultipleAllocations, false) {
		return false
	}
	return ptr.Deref(device.Attributes[attributeApart].BoolValue, false) ||
		ptr.Deref(device.Attributes[ownDriver+"/"+attributeApart].BoolValue, false)
}

// withoutTaint returns the object without NoSchedule taints that have the key: the object itself if there are none.
// So a slice on which nothing else changes is not even a new one.
func withoutTaint(object *resourceapi.ResourceSlice, key string) *resourceapi.ResourceSlice {
	own := func(t resourceapi.DeviceTaint) bool {
		return t.Key == key && t.Effect == resourceapi.DeviceTaintEffectNoSchedule
	}
	out := object
	for i := range object.Spec.Devices {
		taints := object.Spec.Devices[i].Taints
		if key == "" || !slices.ContainsFunc(taints, own) {
			continue
		}
		if out == object {
			shallow := *object
			shallow.Spec.Devices = slices.Clone(object.Spec.Devices)
			out = &shallow
		}
		out.Spec.Devices[i].Taints = slices.DeleteFunc(slices.Clone(taints), own)
	}
	return out
}

// holdsCounters tells whether the slice defines counter sets; its devices do not count then.
func (s *Slice) holdsCounters() bool { return len(s.Object.Spec.SharedCounters) > 0 }

// usesCompatibilityGroups tells whether a device declares compatibility groups, an alpha feature.
func usesCompatibilityGroups(object *resourceapi.ResourceSlice) bool {
	for i := range object.Spec.Devices {
		for j := range object.Spec.Devices[i].ConsumesCounters {
			if len(object.Spec.Devices[i].ConsumesCounters[j].CompatibilityGroups) > 0 {
				return true
			}
		}
	}
	return false
}

func addDevice(s bitset.Set, i, n int) bitset.Set {
	if s == nil {
		s = bitset.New(n)
	}
	s.Add(i)
	return s
}

func hasEffectiveTaint(device *resourceapi.Device) bool {
	for i := range device.Taints {
		if isEffective(device.Taints[i].Effect) {
			return true
		}
	}
	return false
}

// isEffective tells whether a taint with this effect can prevent allocation; None and unknown effects cannot.
func isEffective(effect resourceapi.DeviceTaintEffect) bool {
	return effect == resourceapi.DeviceTaintEffectNoSchedule || effect == resourceapi.DeviceTaintEffectNoExecute
}

// nodeRule says which nodes a slice or a device is for.
type nodeRule struct {
	kind     ruleKind
	name     string
	selector *nodeaffinity.NodeSelector
}

type ruleKind uint8

const (
	ruleNone ruleKind = iota // for no node, or for the devices to say
	ruleName
	ruleAll
	ruleSelector
)

// newNodeRule compiles the three ways to choose nodes; the first that is set counts. A selector must have
// exactly one term (ResourceSlice API), because results merge the terms of several devices.
func newNodeRule(name *string, all *bool, selector *v1.NodeSelector) (nodeRule, error) {
	switch {
	case ptr.Deref(name, "") != "":
		return nodeRule{kind: ruleName, name: *name}, nil
	case ptr.Deref(all, false):
		return nodeRule{kind: ruleAll}, nil
	case selector != nil:
		if n := len(selector.NodeSelectorTerms); n > 1 {
			return nodeRule{}, fmt.Errorf("must have exactly one term, has %d", n)
		}
		compiled, err := nodeaffinity.NewNodeSelector(selector)
		if err != nil {
			return nodeRule{}, err
		}
		return nodeRule{kind: ruleSelector, selector: compiled}, nil
	}
	return nodeRule{}, nil
}

func (r *nodeRule) matches(node *v1.Node) bool {
	switch r.kind {
	case ruleName:
		return node.Name == r.name
	case ruleAll:
		return true
	case ruleSelector:
		return r.selector.Match(node)
	case ruleNone:
	}
	return false
}

// adopt takes over the results of CEL expressions from the slice's predecessor if these cannot tell the two
// apart. Health changes taints and nothing else, and must not cost an evaluation of every selector.
func (s *Slice) adopt(old *Slice) {
	a, b := &s.Object.Spec, &old.Object.Spec
	if a.Driver != b.Driver || len(a.Devices) != len(b.Devices) {
		return
	}
	for i := range a.Devices {
		x, y := &a.Devices[i], &b.Devices[i]
		if ptr.Deref(x.AllowMultipleAllocations, false) != ptr.Deref(y.AllowMultipleAllocations, false) ||
			!amount.Semantic.DeepEqual(x.Attributes, y.Attributes) ||
			!amount.Semantic.DeepEqual(x.Capacity, y.Capacity) {
			return
		}
	}
	s.notes.shareWith(&old.notes)
	s.results.copyFrom(&old.results)
	s.derived.copyFrom(&old.derived)
}
