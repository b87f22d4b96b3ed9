// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory/bitset"
)

// AttributeValue is one value of a device attribute in a form that can be compared with == and used as a key, over
// all pools. Two devices have the same value exactly if these are equal and Kind is not UnknownKind.
type AttributeValue struct {
	Kind   AttributeKind
	String string // for StringKind and VersionKind
	Int    int64  // for IntKind; 0 or 1 for BoolKind
}

// AttributeKind is the type of an attribute.
type AttributeKind uint8

// The kinds of attribute values. UnknownKind is a value of a type that is not supported: it equals nothing.
const (
	StringKind AttributeKind = iota + 1
	IntKind
	BoolKind
	VersionKind
	UnknownKind
)

// Column has the values of one attribute for all devices of a NodePool. Immutable.
type Column struct {
	values  [][]AttributeValue
	groups  []Group
	has     bitset.Set
	unknown bitset.Set
	errs    map[int]error
	errors  bitset.Set
	lists   bool
}

// Group are the devices of a NodePool that have one value. A device whose attribute is a list is in several groups.
// Immutable.
type Group struct {
	Value   AttributeValue
	Devices bitset.Set
}

// Values returns the values of device i: none if the device lacks the attribute, several different ones if the
// attribute is a list, one otherwise. Read only.
func (c *Column) Values(i int) []AttributeValue { return c.values[i] }

// Groups are the devices by value, in the order of the first device of each. Read only.
func (c *Column) Groups() []Group { return c.groups }

// Has are the devices that have the attribute. Read only.
func (c *Column) Has() bitset.Set { return c.has }

// Unknown are the devices with a value of UnknownKind; nil if there are none. Read only.
func (c *Column) Unknown() bitset.Set { return c.unknown }

// HasLists tells whether some device has several values.
func (c *Column) HasLists() bool { return c.lists }

// Errors are the devices for which the attribute could not be derived; nil if there are none. Read only.
func (c *Column) Errors() bitset.Set { return c.errors }

// Err says why the attribute of device i could not be derived, nil if it could.
func (c *Column) Err(i int) error { return c.errs[i] }

// newColumn makes a column of what valuesOf says about each device.
func newColumn(p *NodePool, valuesOf func(i int) ([]AttributeValue, error)) *Column {
	n := len(p.devices)
	c := &Column{values: make([][]AttributeValue, n), has: bitset.New(n)}
	groupOf := make(map[AttributeValue]int)
	for i := range p.devices {
		values, err := valuesOf(i)
		if err != nil {
			if c.errs == nil {
				c.errs = make(map[int]error)
			}
			c.errs[i] = err
			c.errors = addDevice(c.errors, i, n)
			continue
		}
		if len(values) == 0 {
			continue
		}
		c.values[i] = values
		c.has.Add(i)
		c.lists = c.lists || len(values) > 1
		for _, value := range values {
			if value.Kind == UnknownKind {
				c.unknown = addDevice(c.unknown, i, n)
				continue
			}
			at, ok := groupOf[value]
			if !ok {
				at = len(c.groups)
				groupOf[value] = at
				c.groups = append(c.groups, Group{Value: value, Devices: bitset.New(n)})
			}
			c.groups[at].Devices.Add(i)
		}
	}
	return c
}

// columns is the small cache of a NodePool's columns.
type columns struct {
	mu    sync.RWMutex
	known map[columnKey]*Column
}

func (c *columns) len() int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.known)
}

// columnKey is either the name of an attribute that devices have, or what derives one.
type columnKey struct {
	name       resourceapi.FullyQualifiedName
	derivation *Derivation
}

// maxColumns bounds the cached columns of one NodePool; constraints use few different attributes.
const maxColumns = 32

// Attribute returns the values of the attribute with this fully qualified name. An attribute without a domain
// has the driver's (DeviceAttribute API).
func (p *NodePool) Attribute(name resourceapi.FullyQualifiedName) *Column {
	key := columnKey{name: name}
	if known := p.knownColumn(key); known != nil {
		return known
	}
	features := p.Pool.caches.features
	return p.keepColumn(key, newColumn(p, func(i int) ([]AttributeValue, error) {
		attribute, ok := lookUp(p.devices[i], p.Pool.ID.Driver, name)
		if !ok {
			return nil, nil
		}
		return features.values(attribute), nil
	}))
}

// Derived returns the values of an attribute that a request derives from those of each device. The error is that ctx ended before
// they were known; nobody has the attribute then.
func (p *NodePool) Derived(ctx context.Context, d *Derivation) (*Column, error) {
	key := columnKey{derivation: d}
	if known := p.knownColumn(key); known != nil {
		return known, nil
	}
	results := make([]*derivedResult, len(p.Slices))
	for i, s := range p.Slices {
		var err error
		if results[i], err = d.on(ctx, s); err != nil {
			return newColumn(p, func(int) ([]AttributeValue, error) { return nil, nil }), err
		}
	}
	slice := 0
	return p.keepColumn(key, newColumn(p, func(i int) ([]AttributeValue, error) {
		for slice+1 < len(p.starts) && p.starts[slice+1] <= i {
			slice++
		}
		device := i - p.starts[slice]
		return results[slice].values[device], results[slice].errs[device]
	})), nil
}

// knownColumn returns the column that is kept for the key, nil if there is none.
func (p *NodePool) knownColumn(key columnKey) *Column {
	p.columns.mu.RLock()
	defer p.columns.mu.RUnlock()
	return p.columns.known[key]
}

// keepColumn keeps the column for the key, and returns it.
func (p *NodePool) keepColumn(key columnKey, column *Column) *Column {
	c := &p.columns
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.known == nil || len(c.known) >= maxColumns {
		p.Pool.caches.lostColumns.Add(uint64(len(c.known)))
		c.known = make(map[columnKey]*Column)
	}
	c.known[key] = column
	return column
}

// lookUp returns the device's attribute with this fully qualified name.
func lookUp(device *resourceapi.Device, driver string, name resourceapi.FullyQualifiedName) (*resourceapi.DeviceAttribute, bool) {
	attribute, ok := device.Attributes[resourceapi.QualifiedName(name)]
	if !ok {
		domain, id, found := strings.Cut(string(name), "/")
		if !found || domain != driver {
			return nil, false
		}
		attribute, ok = device.Attributes[resourceapi.QualifiedName(id)]
	}
	return &attribute, ok
}

// values returns the attribute's values, each once. With the feature ListTypeAttributes a list has those that are in
// it, and an attribute of an unknown type none, so that it is as if it were missing (KEP-5491). Without it, lists are of
// an unknown type.
func (f Features) values(attribute *resourceapi.DeviceAttribute) []AttributeValue {
	if !f.ListTypeAttributes {
		return []AttributeValue{scalar(attribute)}
	}
	switch {
	case len(attribute.IntValues) > 0:
		return listOf(attribute.IntValues, intValue)
	case len(attribute.BoolValues) > 0:
		return listOf(attribute.BoolValues, boolValue)
	case len(attribute.StringValues) > 0:
		return listOf(attribute.StringValues, stringValue)
	case len(attribute.VersionValues) > 0:
		return listOf(attribute.VersionValues, versionValue)
	}
	if value := scalar(attribute); value.Kind != UnknownKind {
		return []AttributeValue{value}
	}
	return nil
}

func listOf[T any](list []T, valueOf func(T) AttributeValue) []AttributeValue {
	values := make([]AttributeValue, 0, len(list))
	for _, element := range list {
		if value := valueOf(element); !slices.Contains(values, value) {
			values = append(values, value)
		}
	}
	return values
}

func scalar(attribute *resourceapi.DeviceAttribute) AttributeValue {
	switch {
	case attribute.StringValue != nil:
		return stringValue(*attribute.StringValue)
	case attribute.IntValue != nil:
		return intValue(*attribute.IntValue)
	case attribute.BoolValue != nil:
		return boolValue(*attribute.BoolValue)
	case attribute.VersionValue != nil:
		return versionValue(*attribute.VersionValue)
	}
	return AttributeValue{Kind: UnknownKind}
}

func stringValue(v string) AttributeValue  { return AttributeValue{Kind: StringKind, String: v} }
func intValue(v int64) AttributeValue      { return AttributeValue{Kind: IntKind, Int: v} }
func versionValue(v string) AttributeValue { return AttributeValue{Kind: VersionKind, String: v} }

func boolValue(v bool) AttributeValue {
	value := AttributeValue{Kind: BoolKind}
	if v {
		value.Int = 1
	}
	return value
}
