// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package boundedcel

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
)

func compiled(t *testing.T, text string) Compiled {
	t.Helper()
	c, err := Compile(cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true}, text, false)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return c
}

func TestWhatAnExpressionReads(t *testing.T) {
	all := []string{"everything"}
	for text, want := range map[string][]string{
		`true`:                                      nil,
		`device.driver == "a.com"`:                  nil,
		`device.allowMultipleAllocations`:           nil,
		`device.attributes["a.com"].type == "gpu"`:  {"a.com/type"},
		`device.attributes["a.com"]["type"] == "x"`: {"a.com/type"},
		`device.attributes.a.type == "gpu"`:         {"a/type"},
		`has(device.attributes["a.com"].type)`:      {"a.com/type"},
		`.device.attributes["a.com"].type == "gpu"`: {"a.com/type"},
		`[1, 2].exists(i, device.attributes["a.com"].n == i && device.driver == "a.com")`:           {"a.com/n"},
		`{"gpu": device.attributes["a.com"].n}["gpu"] == device.attributes["b.com"].n`:              {"a.com/n", "b.com/n"},
		`device.capacity["a.com"].memory.compareTo(quantity("1Gi")) >= 0`:                           {"capacity a.com/memory"},
		`device.attributes["a.com"].type == "gpu" ? device.capacity["a.com"].m.isInteger() : false`: {"a.com/type", "capacity a.com/m"},
		`device.attributes["a.com"].model.lowerAscii().startsWith(device.attributes["a.com"].kind)`: {"a.com/kind", "a.com/model"},

		`"type" in device.attributes["a.com"]`:                        all,
		`"a.com" in device.attributes`:                                all,
		`cel.bind(a, device.attributes["a.com"], a.type == "gpu")`:    all,
		`device.attributes["a.com"].exists(k, k == "type")`:           all,
		`device.attributes["a.com"][device.driver] == "gpu"`:          all,
		`device.attributes[device.driver].type == "gpu"`:              all,
		`device.attributes["a.com"].?type.hasValue()`:                 all,
		`device.attributes["a.com"][?"type"].orValue("gpu") == "gpu"`: all,
		`[device].all(d, d.attributes["a.com"].type == "gpu")`:        all,
		`[device].all(device, device.attributes["a.com"].n == 1)`:     all,
		`device == device`: all,
		`device.attributes["a.com"] == device.attributes["b.com"]`:                                        all,
		`device.capacity["a.com"].size() == 1`:                                                            all,
		`[1].exists(i, device.attributes["a.com"].n == i) && device.attributes["a.com"].size() == int(1)`: all,
	} {
		r := compiled(t, text).Reads
		got := slices.Sorted(func(yield func(string) bool) {
			for _, name := range r.attributes {
				if !yield(name[0] + "/" + name[1]) {
					return
				}
			}
			for _, name := range r.capacity {
				if !yield("capacity " + name[0] + "/" + name[1]) {
					return
				}
			}
		})
		if r.everything {
			got = all
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}

// TestADeviceAsFarAsItIsReadGetsTheSameAnswer has expressions of all forms, right and wrong ones, on devices that differ in some values.
func TestADeviceAsFarAsItIsReadGetsTheSameAnswer(t *testing.T) {
	ofMaps := []string{
		`device.attributes["a.com"]`, `device.attributes["b.com"]`, `device.attributes["none.com"]`, `device.attributes[device.driver]`,
		`device.attributes.a`,
	}
	names := []string{`.x`, `["x"]`, `.y`, `["absent"]`}
	forms := []func(a, b string) string{
		func(a, b string) string { return a + ` == ` + b },
		func(a, b string) string { return `has(` + a + `) && ` + a + ` == 1` },
		func(a, b string) string { return a + ` == "1" || ` + b + ` == true` },
		func(a, b string) string { return `[1, 2].exists(i, i == ` + a + `)` },
		func(a, b string) string { return a + ` == 1 ? ` + b + ` == 1 : device.allowMultipleAllocations` },
		func(a, b string) string { return a + `.size() == 1 || ` + b + `.contains("1")` },
		func(a, b string) string { return `1 in ` + a },
		func(a, b string) string { return `cel.bind(v, ` + a + `, v == ` + b + `)` },
	}
	quantities := []func(string) string{
		func(c string) string { return c + `.isInteger()` },
		func(c string) string { return c + `.compareTo(quantity("1")) == 0` },
		func(c string) string { return `has(` + c + `)` },
	}
	wholes := []func(m string) string{
		func(m string) string { return `"x" in ` + m },
		func(m string) string { return m + `.size() == 1` },
		func(m string) string { return m + `.exists(k, k == "y")` },
		func(m string) string { return `cel.bind(m, ` + m + `, m.x == 1)` },
		func(m string) string { return m + `.?x.orValue(1) == 1` },
		func(m string) string { return m + ` == device.attributes["b.com"]` },
	}
	values := []func() resourceapi.DeviceAttribute{
		func() resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValue: ptr.To[int64](1)} },
		func() resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValue: ptr.To[int64](2)} },
		func() resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: ptr.To("1")} },
		func() resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{BoolValue: ptr.To(true)} },
		func() resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValues: []int64{1}} },
		func() resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValues: []int64{}} },
		func() resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValues: []string{"1"}} },
		func() resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{BoolValues: []bool{true}} },
		func() resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{VersionValue: ptr.To("1.0.0")} },
		func() resourceapi.DeviceAttribute {
			return resourceapi.DeviceAttribute{VersionValues: []string{"1.0.0"}}
		},
	}
	wrong := []resourceapi.DeviceAttribute{
		{},
		{VersionValue: ptr.To("1")},
		{VersionValues: []string{"1.0.0", ""}},
		{VersionValues: []string{""}, IntValue: ptr.To[int64](1)},
		{VersionValue: ptr.To(""), IntValue: ptr.To[int64](1)},
	}
	rng := rand.New(rand.NewPCG(1, 2))
	one := func(list []string) string { return list[rng.IntN(len(list))] }
	device := func() cel.Device {
		d := cel.Device{
			Driver: one([]string{"a.com", "b.com"}), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{},
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{},
		}
		if rng.IntN(2) == 0 {
			d.AllowMultipleAllocations = ptr.To(rng.IntN(2) == 0)
		}
		for _, name := range []string{"x", "y", "z"} { // with the driver's domain or without it, never both
			if rng.IntN(3) > 0 {
				d.Attributes[resourceapi.QualifiedName(one([]string{name, d.Driver + "/" + name}))] = values[rng.IntN(len(values))]()
			}
			if rng.IntN(3) == 0 {
				d.Attributes[resourceapi.QualifiedName("a/"+name)] = values[rng.IntN(len(values))]()
			}
		}
		if rng.IntN(8) == 0 {
			d.Attributes["w"] = wrong[rng.IntN(len(wrong))]
		}
		if rng.IntN(2) == 0 {
			d.Capacity["x"] = resourceapi.DeviceCapacity{Value: resource.MustParse(one([]string{"1", "1000m", "2", "1.5"}))}
		}
		return d
	}
	answer := func(c Compiled, d cel.Device) string {
		matches, _, err := c.DeviceMatches(t.Context(), d)
		return fmt.Sprint(matches, err)
	}
	var trimmed, same, failed int
	for range 1000 {
		var text string
		switch rng.IntN(8) {
		case 0:
			text = quantities[rng.IntN(len(quantities))](`device.capacity["` + one([]string{"a.com", "b.com"}) + `"].x`)
		case 1:
			text = wholes[rng.IntN(len(wholes))](one(ofMaps))
		default:
			text = forms[rng.IntN(len(forms))](one(ofMaps)+one(names), one(ofMaps)+one(names))
		}
		c, err := Compile(cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true}, text, false)
		if err != nil {
			continue // no such expression
		}
		var d, before cel.Device
		var said string
		for i := range 6 {
			before = d
			if i%2 == 0 {
				d = device()
			} else { // the last one but for one attribute
				d.Attributes = maps.Clone(d.Attributes)
				name := resourceapi.QualifiedName(one([]string{"x", "v", "z"}))
				delete(d.Attributes, resourceapi.QualifiedName(d.Driver)+"/"+name)
				d.Attributes[name] = values[rng.IntN(len(values))]()
			}
			want := answer(c, d)
			read := c.Reads.Of(d)
			if got := answer(c, read); got != want {
				t.Fatalf("%s: %s of what is read, want %s\n%+v\n%+v", text, got, want, d, read)
			}
			if i > 0 && c.Reads.Same(before, d) {
				if said != want {
					t.Fatalf("%s: %s and %s of the same\n%+v\n%+v", text, said, want, before, d)
				}
				same++
			}
			if len(read.Attributes) < len(d.Attributes) {
				trimmed++
			}
			if want != "true <nil>" && want != "false <nil>" {
				failed++
			}
			said = want
		}
	}
	if trimmed < 300 || same < 300 || failed < 300 {
		t.Errorf("smaller %d times, the same %d times, errors %d times: the draws show too little", trimmed, same, failed)
	}
}

// TestDevicesThatAreNotTheSame differ in one thing.
func TestDevicesThatAreNotTheSame(t *testing.T) {
	with := func(change func(*cel.Device)) cel.Device {
		d := cel.Device{
			Driver:     "a.com",
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"x": {IntValue: ptr.To[int64](1)}},
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"x": {Value: resource.MustParse("1")}},
		}
		change(&d)
		return d
	}
	attribute := func(a resourceapi.DeviceAttribute) func(*cel.Device) {
		return func(d *cel.Device) { d.Attributes["x"] = a }
	}
	amount := func(text string) func(*cel.Device) {
		return func(d *cel.Device) { d.Capacity["x"] = resourceapi.DeviceCapacity{Value: resource.MustParse(text)} }
	}
	others := map[string]func(*cel.Device){
		"as it is": func(*cel.Device) {},
		"driver":   func(d *cel.Device) { d.Driver = "b.com" },
		"shared":   func(d *cel.Device) { d.AllowMultipleAllocations = ptr.To(true) },
		"one more": func(d *cel.Device) { d.Attributes["y"] = d.Attributes["x"] },
		"one less": func(d *cel.Device) { delete(d.Attributes, "x") },
		"another name": func(d *cel.Device) {
			d.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"y": d.Attributes["x"]}
		},
		"a number":          attribute(resourceapi.DeviceAttribute{IntValue: ptr.To[int64](2)}),
		"a text":            attribute(resourceapi.DeviceAttribute{StringValue: ptr.To("1")}),
		"true":              attribute(resourceapi.DeviceAttribute{BoolValue: ptr.To(true)}),
		"false":             attribute(resourceapi.DeviceAttribute{BoolValue: ptr.To(false)}),
		"a version":         attribute(resourceapi.DeviceAttribute{VersionValue: ptr.To("1.0.0")}),
		"numbers":           attribute(resourceapi.DeviceAttribute{IntValues: []int64{1}}),
		"texts":             attribute(resourceapi.DeviceAttribute{StringValues: []string{"1"}}),
		"truths":            attribute(resourceapi.DeviceAttribute{BoolValues: []bool{true}}),
		"versions":          attribute(resourceapi.DeviceAttribute{VersionValues: []string{"1.0.0"}}),
		"no numbers":        attribute(resourceapi.DeviceAttribute{IntValues: []int64{}}),
		"nothing":           attribute(resourceapi.DeviceAttribute{}),
		"an amount":         amount("2"),
		"written otherwise": amount("1000m"),
		"no amount":         func(d *cel.Device) { d.Capacity = nil },
	}
	names := slices.Sorted(maps.Keys(others))
	for _, a := range names {
		for _, b := range names {
			if got := (&Reads{everything: true}).Same(with(others[a]), with(others[b])); got != (a == b) {
				t.Errorf("%s and %s: same %t", a, b, got)
			}
		}
	}
}
