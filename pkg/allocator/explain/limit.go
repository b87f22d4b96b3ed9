// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
)

// Limit is what the cluster has for a request that asks for more: no node could satisfy it, whoever releases devices.
type Limit struct {
	// Asked is how many devices are asked for on one node, by this request and those that compete with it for the same devices, and
	// Devices how many of them the node with the most has.
	Asked   int `json:"asked,omitempty"`
	Devices int `json:"devices,omitempty"`
	// Others is how many other requests Asked includes.
	Others int `json:"others,omitempty"`
	// Capacity is set if it is what one device is asked for and none has: AskedCapacity of it, where the largest has LargestCapacity.
	Capacity        resourceapi.QualifiedName `json:"capacity,omitempty"`
	AskedCapacity   string                    `json:"askedCapacity,omitempty"`
	LargestCapacity string                    `json:"largestCapacity,omitempty"`
}

// describe says what is asked for and what there is, such as "asks for 9 gpu.example.com devices of one node, the largest has 8". It is
// empty if there is nothing of it: then it is the other counts that say why.
func (l *Limit) describe(class string, selected bool) string {
	capacity := clip(string(l.Capacity), maxQuoted)
	text := ""
	switch {
	case l.Capacity != "" && l.LargestCapacity == "0":
		return fmt.Sprintf("asks for %s %s, and no %s device has any", l.AskedCapacity, capacity, class)
	case l.Capacity != "":
		return fmt.Sprintf("asks for %s %s, the largest %s device has %s", l.AskedCapacity, capacity, class, l.LargestCapacity)
	case l.Devices == 0:
		return ""
	case l.Others > 0:
		text = fmt.Sprintf("with %d more %s of the pod asks for %d %s devices of one node, the largest has %d",
			l.Others, plural(l.Others, "request"), l.Asked, class, l.Devices)
	default:
		text = fmt.Sprintf("asks for %d %s devices of one node, the largest has %d", l.Asked, class, l.Devices)
	}
	if selected {
		text += " that match its selectors"
	}
	return text
}
