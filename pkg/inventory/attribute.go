package inventory

import (
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
)

// AttributeValue is a device attribute's value in a form that can be compared with == and used as a key, over
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
	NoAttribute AttributeKind = iota
	StringKind
	IntKind
	BoolKind
	VersionKind
	UnknownKind
)

// Column has the values of one attribute for all devices of a NodePool. Immutable.
type Column struct {
	values  []AttributeValue
	unknown bool
}

// Value returns the value of device i; its kind is NoAttribute if the device lacks the attribute.
func (c *Column) Value(i int) AttributeValue { return c.values[i] }

// HasUnknown tells whether any device has a value of UnknownKind.
func (c *Column) HasUnknown() bool { return c.unknown }

// columns is the small cache of a NodePool's columns.
type columns struct {
	mu     sync.RWMutex
	byName map[resourceapi.FullyQualifiedName]*Column
}

// maxColumns bounds the cached columns of one NodePool; constraints use few different attributes.
const maxColumns = 32

// Attribute returns the values of the attribute with this fully qualified name. An attribute without a domain
// has the driver's (DeviceAttribute API).
func (p *NodePool) Attribute(name resourceapi.FullyQualifiedName) *Column {
	p.columns.mu.RLock()
	column := p.columns.byName[name]
	p.columns.mu.RUnlock()
	if column != nil {
		return column
	}
	column = &Column{values: make([]AttributeValue, len(p.devices))}
	for i, device := range p.devices {
		column.values[i] = attributeValue(device, p.Pool.ID.Driver, name)
		column.unknown = column.unknown || column.values[i].Kind == UnknownKind
	}
	p.columns.mu.Lock()
	defer p.columns.mu.Unlock()
	if p.columns.byName == nil || len(p.columns.byName) >= maxColumns {
		p.columns.byName = make(map[resourceapi.FullyQualifiedName]*Column)
	}
	p.columns.byName[name] = column
	return column
}

func attributeValue(device *resourceapi.Device, driver string, name resourceapi.FullyQualifiedName) AttributeValue {
	attribute, ok := device.Attributes[resourceapi.QualifiedName(name)]
	if !ok {
		domain, id, found := strings.Cut(string(name), "/")
		if !found || domain != driver {
			return AttributeValue{}
		}
		if attribute, ok = device.Attributes[resourceapi.QualifiedName(id)]; !ok {
			return AttributeValue{}
		}
	}
	switch {
	case attribute.StringValue != nil:
		return AttributeValue{Kind: StringKind, String: *attribute.StringValue}
	case attribute.IntValue != nil:
		return AttributeValue{Kind: IntKind, Int: *attribute.IntValue}
	case attribute.BoolValue != nil:
		value := AttributeValue{Kind: BoolKind}
		if *attribute.BoolValue {
			value.Int = 1
		}
		return value
	case attribute.VersionValue != nil:
		return AttributeValue{Kind: VersionKind, String: *attribute.VersionValue}
	}
	return AttributeValue{Kind: UnknownKind}
}
