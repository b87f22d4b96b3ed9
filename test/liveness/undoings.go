// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"time"

	"stowage.dev/stowage/test/liveness/memoryapi"
)

// undoings are the situations in which a scheduler takes back what it, or one before it, wrote. The writes that fail come after the first
// one that a situation has fail itself, or after its step [Undo].
var undoings = map[string]Scenario{
	"a claim is shared, and a binding is refused": {
		Nodes: []Node{{Name: "a", GPUs: 2}, {Name: "b", GPUs: 2}},
		Steps: []Step{
			Fail{Verb: "create", What: "pods/binding", With: memoryapi.Refused, Times: 1},
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c"}},
			Pod{Name: "q", Claims: []string{"c"}},
		},
	},
	"a claim is shared, and both bindings are refused": {
		Nodes: []Node{{Name: "a", GPUs: 2}, {Name: "b", GPUs: 2}},
		Steps: []Step{
			Fail{Verb: "create", What: "pods/binding", With: memoryapi.Refused, Times: 2},
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c"}},
			Pod{Name: "q", Claims: []string{"c"}},
		},
	},
	"a pod has two claims, and its binding is lost": {
		Nodes: []Node{{Name: "a", GPUs: 2}, {Name: "b", GPUs: 2}},
		Steps: []Step{
			Fail{Verb: "create", What: "pods/binding", With: memoryapi.Lost, Times: 1},
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Claim{Name: "d", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c", "d"}},
		},
	},
	"a pod has two claims, and the write of the second is lost": {
		Nodes: []Node{{Name: "a", GPUs: 2}, {Name: "b", GPUs: 2}},
		Steps: []Step{
			Fail{Verb: "update", What: "resourceclaims/status", After: 1, With: memoryapi.Lost, Times: 1},
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Claim{Name: "d", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c", "d"}},
		},
	},
	"the bindings of two pods with extended resources are refused": {
		Nodes: []Node{{Name: "a", GPUs: 1}, {Name: "b", GPUs: 1}},
		Steps: []Step{
			Fail{Verb: "create", What: "pods/binding", With: memoryapi.Refused, Times: 2}, Pod{Name: "p", Extended: 1}, Pod{Name: "q", Extended: 1},
		},
	},
	"the bindings of a group of two are refused": {
		Groups: true,
		Nodes:  []Node{{Name: "a", GPUs: 2}, {Name: "b", GPUs: 2}},
		Steps: []Step{
			Fail{Verb: "create", What: "pods/binding", With: memoryapi.Refused, Times: 2},
			Group{Name: "g", Gang: 2, Ask: Ask{GPUs: 1}},
			Wait{time.Millisecond},
			Pod{Name: "p", Group: "g", Common: true},
			Pod{Name: "q", Group: "g", Common: true, Ask: Ask{GPUs: 1}},
		},
	},
	"two pods are deleted while the device of their claim is attached": {
		Nodes: []Node{{Name: "a", Attached: 1}},
		Steps: []Step{
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c"}},
			Pod{Name: "q", Claims: []string{"c"}},
			Wait{time.Second},
			Undo{},
			Delete{Pod: "p"},
			Delete{Pod: "q"},
		},
	},
	"a pod with extended resources is deleted while its devices are attached": {
		Nodes: []Node{{Name: "a", GPUs: 1, Attached: 1}},
		Steps: []Step{Pod{Name: "p", Extended: 2}, Wait{time.Second}, Undo{}, Delete{Pod: "p"}},
	},
	"a device cannot be attached at first": {
		Nodes: []Node{{Name: "a", Attached: 2}},
		Steps: []Step{
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Claim{Name: "d", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c", "d"}},
			Wait{1900 * time.Millisecond},
			Undo{},
		},
	},
	"a device of extended resources never becomes ready": {
		BindingTimeout: 20 * time.Second,
		Nodes:          []Node{{Name: "a", Unready: 1}, {Name: "b", GPUs: 1, Late: true}},
		Steps: []Step{
			Pod{Name: "p", Extended: 1}, Wait{time.Second}, Join{Node: "b"}, Publish{Node: "b"}, Undo{}, Wait{3 * time.Minute},
		},
	},
	"a scheduler ends, and the device of two pods' claim never becomes ready": {
		BindingTimeout: 20 * time.Second,
		Nodes:          []Node{{Name: "a", Unready: 1}, {Name: "b", GPUs: 1, Late: true}},
		Steps: []Step{
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c"}},
			Pod{Name: "q", Claims: []string{"c"}},
			Wait{time.Second},
			Restart{},
			Join{Node: "b"},
			Publish{Node: "b"},
			Wait{time.Second},
			Undo{},
			Wait{3 * time.Minute},
		},
	},
	"a node is lost while a device of two pods' claim is attached": {
		BindingTimeout: 20 * time.Second,
		Nodes:          []Node{{Name: "a", Unready: 1}, {Name: "b", GPUs: 1, Late: true}},
		Steps: []Step{
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c"}},
			Pod{Name: "q", Claims: []string{"c"}},
			Wait{time.Second},
			Join{Node: "b"},
			Publish{Node: "b"},
			Undo{},
			Leave{Node: "a"},
			Wait{3 * time.Minute},
		},
	},
	"a scheduler ends, and the node of two pods' claim is lost": {
		Nodes: []Node{{Name: "a", Unready: 1}, {Name: "b", GPUs: 1, Late: true}},
		Steps: []Step{
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c"}},
			Pod{Name: "q", Claims: []string{"c"}},
			Wait{time.Second},
			Undo{},
			Leave{Node: "a"},
			Join{Node: "b"},
			Publish{Node: "b"},
			Restart{},
		},
	},
	"a scheduler ends, and the node of a pod's extended resources is cordoned": {
		Nodes: []Node{{Name: "a", GPUs: 1}},
		Steps: []Step{
			Fail{Verb: "create", What: "pods/binding", With: memoryapi.Lost, Times: 1, Kill: Before},
			Pod{Name: "p", Extended: 1},
			Wait{500 * time.Millisecond},
			Cordon{Node: "a"},
		},
	},
	"a scheduler ends, and the node of two pods' claim does not do for a while": {
		Nodes: []Node{{Name: "a", GPUs: 1}},
		Steps: []Step{
			Fail{Verb: "create", What: "pods/binding", With: memoryapi.Lost, Times: 1, Kill: Before},
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c"}},
			Pod{Name: "q", Claims: []string{"c"}},
			Wait{500 * time.Millisecond},
			Cordon{Node: "a"},
			Wait{1500 * time.Millisecond},
			Cordon{Node: "a", Lifted: true},
		},
	},
	"a scheduler ends that was binding a group, and the node is cordoned": {
		Groups: true,
		Nodes:  []Node{{Name: "a", GPUs: 2}},
		Steps: []Step{
			Fail{Verb: "create", What: "pods/binding", With: memoryapi.Lost, Times: 1, Kill: After},
			Group{Name: "g", Gang: 2, Ask: Ask{GPUs: 1}},
			Wait{time.Millisecond},
			Pod{Name: "p", Group: "g", Common: true},
			Pod{Name: "q", Group: "g", Common: true, Ask: Ask{GPUs: 1}},
			Wait{500 * time.Millisecond},
			Cordon{Node: "a"},
		},
	},
	"a scheduler ends, and what it wrote late is of a device that another pod has by then": {
		Nodes: []Node{{Name: "a", GPUs: 1}},
		Steps: []Step{
			Fail{Verb: "update", What: "resourceclaims/status", With: memoryapi.Late, Times: 1, Kill: Before},
			Pod{Name: "p", Ask: Ask{GPUs: 1}},
			Wait{500 * time.Millisecond},
			Pod{Name: "q", Priority: 10, Ask: Ask{GPUs: 1}},
		},
	},
}
