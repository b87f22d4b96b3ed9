// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package checker

import (
	"reflect"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// entry is one configuration with the requests that it is for, in the order of the claim.
type entry struct {
	source   resourceapi.AllocationConfigSource
	config   resourceapi.DeviceConfiguration
	requests []string
}

// config makes sure that the allocation has the configuration of the classes of all requests, then that of the
// claim, each in its order and for the right requests.
func (c *check) config(claim *resourceapi.ResourceClaim, grants []*grant, got []resourceapi.DeviceAllocationConfiguration) {
	chosen := make(map[string]*request) // by the name of the request
	var names []string
	for i := range claim.Spec.Devices.Requests {
		in := &claim.Spec.Devices.Requests[i]
		names = append(names, in.Name)
		for _, g := range grants {
			if g.request.of == in {
				chosen[in.Name] = g.request
			}
		}
		if chosen[in.Name] == nil && in.Exactly != nil {
			chosen[in.Name] = c.findRequest(claim, in.Name) // wanted nothing
		}
	}
	applies := func(to []string) []string {
		var out []string
		for _, name := range names {
			if r := chosen[name]; len(to) == 0 || slices.Contains(to, name) || (r != nil && slices.Contains(to, r.name)) {
				out = append(out, name)
			}
		}
		return out
	}

	var want []entry
	var classes []string
	for _, name := range names {
		if r := chosen[name]; r != nil && !slices.Contains(classes, r.DeviceClassName) {
			classes = append(classes, r.DeviceClassName)
		}
	}
	for _, name := range classes {
		class := c.findClass(name)
		if class == nil {
			continue
		}
		var users []string
		for _, request := range names {
			if r := chosen[request]; r != nil && r.DeviceClassName == name {
				users = append(users, request)
			}
		}
		for i := range class.Spec.Config {
			want = append(want, entry{resourceapi.AllocationConfigSourceClass, class.Spec.Config[i].DeviceConfiguration, users})
		}
	}
	for i := range claim.Spec.Devices.Config {
		config := &claim.Spec.Devices.Config[i]
		if to := applies(config.Requests); len(to) > 0 {
			want = append(want, entry{resourceapi.AllocationConfigSourceClaim, config.DeviceConfiguration, to})
		}
	}

	var have []entry
	for i := range got {
		if to := applies(got[i].Requests); len(to) > 0 {
			have = append(have, entry{got[i].Source, got[i].DeviceConfiguration, to})
		}
	}
	if !slices.EqualFunc(have, want, func(a, b entry) bool { return reflect.DeepEqual(a, b) }) {
		c.violation("claim %s: the configuration is %+v, which should be %+v", claim.Name, have, want)
	}
}
