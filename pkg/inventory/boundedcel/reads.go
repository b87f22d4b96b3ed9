// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package boundedcel

import (
	"slices"
	"strings"

	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
)

// Reads is what an expression asks a device for. Most ask for two or three attributes by their names, and upstream makes CEL values of all
// that a device has each time. So they get a device that has these alone, and devices that are the same to them get one answer.
type Reads struct {
	// everything is that names are not written there, as when a loop goes over all attributes, or one of the maps is bound to a name.
	everything           bool
	attributes, capacity names
}

// names are those of attributes or capacities: domain and identifier. There are few, and they are gone through.
type names [][2]string

func (n names) has(name resourceapi.QualifiedName, driver string) bool {
	domain, id, qualified := strings.Cut(string(name), "/")
	if !qualified {
		domain, id = driver, string(name)
	}
	return slices.Contains(n, [2]string{domain, id})
}

func (n *names) add(name [2]string) {
	if !slices.Contains(*n, name) {
		*n = append(*n, name)
	}
}

// Of returns the device as far as the expression asks for it. It is an error upstream that some attribute has no valid value, also if
// nobody asks for it; what may be such a one stays.
func (r *Reads) Of(device cel.Device) cel.Device {
	if !r.everything {
		device.Attributes = only(device.Attributes, func(name resourceapi.QualifiedName, value resourceapi.DeviceAttribute) bool {
			return r.attribute(name, value, device.Driver)
		})
		device.Capacity = only(device.Capacity, func(name resourceapi.QualifiedName, _ resourceapi.DeviceCapacity) bool {
			return r.capacity.has(name, device.Driver)
		})
	}
	return device
}

// Same reports whether the expression gives one answer for a and b. Amounts that are written differently are not the same: isInteger()
// of CEL tells 1 from 1000m.
func (r *Reads) Same(a, b cel.Device) bool {
	return a.Driver == b.Driver && ptr.Equal(a.AllowMultipleAllocations, b.AllowMultipleAllocations) &&
		same(a.Attributes, b.Attributes, func(name resourceapi.QualifiedName, value resourceapi.DeviceAttribute) bool {
			return r.everything || r.attribute(name, value, a.Driver)
		}, sameAttribute) &&
		same(a.Capacity, b.Capacity, func(name resourceapi.QualifiedName, _ resourceapi.DeviceCapacity) bool {
			return r.everything || r.capacity.has(name, a.Driver)
		}, func(a, b resourceapi.DeviceCapacity) bool { return a.Value == b.Value })
}

func (r *Reads) attribute(name resourceapi.QualifiedName, value resourceapi.DeviceAttribute, driver string) bool {
	return mayBeInvalid(value) || r.attributes.has(name, driver)
}

func only[V any](all map[resourceapi.QualifiedName]V, read func(resourceapi.QualifiedName, V) bool) map[resourceapi.QualifiedName]V {
	var some map[resourceapi.QualifiedName]V
	for name, value := range all {
		if read(name, value) {
			if some == nil {
				some = map[resourceapi.QualifiedName]V{}
			}
			some[name] = value
		}
	}
	return some
}

// same compares what is read. Values are handed on as they are: by pointer, each would be a copy on the heap.
func same[V any](a, b map[resourceapi.QualifiedName]V, read func(resourceapi.QualifiedName, V) bool, equal func(a, b V) bool) bool {
	more := 0 // of a than of b
	for name, value := range a {
		if !read(name, value) {
			continue
		}
		other, found := b[name]
		if !found || !equal(value, other) {
			return false
		}
		more++
	}
	for name, value := range b {
		if read(name, value) {
			more--
		}
	}
	return more == 0
}

// mayBeInvalid is whether upstream looks at more than which kind of value it is, in upstream's order: there may be several.
func mayBeInvalid(a resourceapi.DeviceAttribute) bool {
	switch {
	case a.IntValues != nil, a.BoolValues != nil, a.StringValues != nil:
		return false
	case a.VersionValues != nil:
		return true
	}
	return a.IntValue == nil && a.BoolValue == nil && a.StringValue == nil
}

func sameAttribute(a, b resourceapi.DeviceAttribute) bool {
	return ptr.Equal(a.StringValue, b.StringValue) && ptr.Equal(a.IntValue, b.IntValue) && ptr.Equal(a.BoolValue, b.BoolValue) &&
		ptr.Equal(a.VersionValue, b.VersionValue) && sameList(a.StringValues, b.StringValues) && sameList(a.IntValues, b.IntValues) &&
		sameList(a.BoolValues, b.BoolValues) && sameList(a.VersionValues, b.VersionValues)
}

// sameList tells an empty list, which is a value, from none.
func sameList[T comparable](a, b []T) bool { return (a == nil) == (b == nil) && slices.Equal(a, b) }

// readsOf finds what is read in an expression whose macros are expanded.
func readsOf(e ast.Expr) Reads {
	var r Reads
	r.look(e)
	return r
}

func (r *Reads) look(e ast.Expr) {
	if r.everything || r.isRead(e) {
		return
	}
	switch e.Kind() {
	case ast.IdentKind:
		r.everything = isDevice(e)
	case ast.SelectKind:
		r.look(e.AsSelect().Operand())
	case ast.CallKind:
		if call := e.AsCall(); call.IsMemberFunction() {
			r.look(call.Target())
		}
		r.lookAll(e.AsCall().Args())
	case ast.ListKind:
		r.lookAll(e.AsList().Elements())
	case ast.MapKind:
		for _, entry := range e.AsMap().Entries() {
			r.look(entry.AsMapEntry().Key())
			r.look(entry.AsMapEntry().Value())
		}
	case ast.ComprehensionKind:
		loop := e.AsComprehension()
		r.lookAll([]ast.Expr{loop.IterRange(), loop.AccuInit(), loop.LoopCondition(), loop.LoopStep(), loop.Result()})
	case ast.LiteralKind:
	default: // which no selector has
		r.everything = true
	}
}

func (r *Reads) lookAll(all []ast.Expr) {
	for _, e := range all {
		r.look(e)
	}
}

// isRead reports whether the expression is a name of the device that is written there, as device.attributes["gpu.nvidia.com"].model.
func (r *Reads) isRead(e ast.Expr) bool {
	if of, name, ok := member(e); ok && isDevice(of) {
		return name == "driver" || name == "allowMultipleAllocations"
	}
	of, id, ok := member(e)
	if !ok {
		return false
	}
	if of, domain, ok := member(of); ok {
		switch of, kind, ok := member(of); {
		case !ok || !isDevice(of):
		case kind == "attributes":
			r.attributes.add([2]string{domain, id})
			return true
		case kind == "capacity":
			r.capacity.add([2]string{domain, id})
			return true
		}
	}
	return false
}

// member takes x.name and x["name"] apart.
func member(e ast.Expr) (of ast.Expr, name string, ok bool) {
	switch e.Kind() {
	case ast.SelectKind:
		return e.AsSelect().Operand(), e.AsSelect().FieldName(), true
	case ast.CallKind:
		if call := e.AsCall(); call.FunctionName() == operators.Index && len(call.Args()) == 2 && call.Args()[1].Kind() == ast.LiteralKind {
			name, ok = call.Args()[1].AsLiteral().Value().(string)
			return call.Args()[0], name, ok
		}
	}
	return nil, "", false
}

// isDevice also takes a loop's variable of that name for the device.
func isDevice(e ast.Expr) bool {
	return e.Kind() == ast.IdentKind && strings.TrimPrefix(e.AsIdent(), ".") == "device"
}
