// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// Error says that parameters of a claim or a class are refused. That does not pass by itself: they cannot be changed in a claim.
type Error struct {
	// Path of the parameters in the claim, with where they come from.
	Path string
	// Err names the field, its value and what is wanted.
	Err error
}

func (e *Error) Error() string { return e.Path + ": " + e.Err.Error() }

func (e *Error) Unwrap() error { return e.Err }

// Device is one of the claim's devices, for which parameters are looked up.
type Device struct {
	// Request is the result's, with the subrequest after a slash if there is one.
	Request string
	// Kind of parameters that the device takes.
	Kind        Kind
	AdminAccess bool
	// Share: other claims have shares of the GPU, too.
	Share bool
}

// Set is all parameters for one driver in a claim's allocation.
type Set struct{ entries []entry }

type entry struct {
	path      string
	kind      Kind
	settings  Settings
	fromClaim bool
	// requests that it is for; none for all.
	requests []string
}

// Read decodes the parameters for the driver in an allocation. All must be valid, also those that no request
// turns out to use.
func Read(driver string, configs []resourceapi.DeviceAllocationConfiguration) (*Set, error) {
	set := &Set{}
	for i, c := range configs {
		if c.Opaque == nil || c.Opaque.Driver != driver {
			continue
		}
		path := fmt.Sprintf("status.allocation.devices.config[%d]", i)
		if c.Source != resourceapi.AllocationConfigSourceClass && c.Source != resourceapi.AllocationConfigSourceClaim {
			return nil, &Error{
				Path: path + ".source",
				Err:  fmt.Errorf("%q: want %s or %s", c.Source, resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim),
			}
		}
		path += fmt.Sprintf(".opaque.parameters (from the %s)", strings.ToLower(strings.TrimPrefix(string(c.Source), "From")))
		kind, settings, err := Decode(c.Opaque.Parameters.Raw)
		if err != nil {
			return nil, &Error{Path: path, Err: err}
		}
		set.entries = append(set.entries, entry{
			path: path, kind: kind, settings: settings,
			fromClaim: c.Source == resourceapi.AllocationConfigSourceClaim, requests: c.Requests,
		})
	}
	return set, nil
}

// For returns what applies to a device of that kind that was allocated for the request ("request" or
// "request/subrequest"). The claim's parameters come before the class's, and of each a later one before an
// earlier one (resource.k8s.io/v1 DeviceAllocationConfiguration). Parameters of another kind that name this very request
// are an error; those for all requests, or for all alternatives of one, are then meant for others. So are a class's
// that has parameters of this kind, too: it is of devices of several kinds.
func (s *Set) For(request string, kind Kind) (Settings, error) {
	chosen, err := s.choose(request, kind)
	if chosen == nil || err != nil {
		return Settings{}, err
	}
	return chosen.settings, nil
}

// Resolve is For with the node's rules for the device. Refused is what they have against the parameters; a claim that is prepared already
// has the settings all the same.
func (s *Set) Resolve(device Device, rules *Rules) (settings Settings, refused, err error) {
	chosen, err := s.choose(device.Request, device.Kind)
	if err != nil {
		return Settings{}, nil, err
	}
	if chosen != nil {
		settings = chosen.settings
		if err := rules.check(settings, device.Share); err != nil && !device.AdminAccess {
			refused = &Error{Path: chosen.path, Err: err}
		}
	}
	if device.Share {
		settings = settings.ForShare(rules)
	}
	return settings, refused, nil
}

// choose returns the parameters that For is about, nil if there are none.
func (s *Set) choose(request string, kind Kind) (*entry, error) {
	var chosen *entry
	var other error // parameters of a class that are of another kind
	for i := range s.entries {
		e := &s.entries[i]
		applies, byName := e.appliesTo(request)
		switch {
		case !applies:
		case e.kind == kind:
			if chosen == nil || e.fromClaim || !chosen.fromClaim {
				chosen = e
			}
		case byName:
			err := &Error{Path: e.path, Err: fmt.Errorf("kind: %s is not for the device of request %s, which takes a %s", e.kind, request, kind)}
			if e.fromClaim {
				return nil, err
			}
			other = cmp.Or[error](other, err)
		}
	}
	if chosen == nil {
		return nil, other
	}
	return chosen, nil
}

// appliesTo also says whether the request is named itself.
func (e *entry) appliesTo(request string) (applies, byName bool) {
	if len(e.requests) == 0 {
		return true, false
	}
	if slices.Contains(e.requests, request) {
		return true, true
	}
	parent, _, sub := strings.Cut(request, "/")
	return sub && slices.Contains(e.requests, parent), false
}

// Check refuses parameters of the claim that none of its devices takes: they would be without effect, and nobody would be told. Those for a
// request that has alternatives may be meant for one that was not chosen, and those for devices of other drivers alone for their turn. The
// devices are all that the claim has of the driver.
func (s *Set) Check(devices []Device) error {
	for i := range s.entries {
		if e := &s.entries[i]; e.fromClaim {
			if err := e.check(devices); err != nil {
				return &Error{Path: e.path, Err: err}
			}
		}
	}
	return nil
}

func (e *entry) check(devices []Device) (err error) {
	for _, d := range devices {
		applies, byName := e.appliesTo(d.Request)
		switch {
		case !applies:
			continue
		case e.kind != d.Kind && !byName && strings.Contains(d.Request, "/"):
			return nil
		case e.kind != d.Kind:
			err = cmp.Or(err, fmt.Errorf("kind: %s is not for any device of the claim: that of request %s takes a %s", e.kind, d.Request, d.Kind))
		case d.AdminAccess && e.settings.Strategy != "":
			err = cmp.Or(err, fmt.Errorf("sharing.strategy: %q: the device of request %s has admin access, which leaves it as it is",
				e.settings.Strategy, d.Request))
		default:
			return nil
		}
	}
	return err
}

// Allocated are the parameters in the claim's allocation, with the requests that the claim names for them. A scheduler leaves the names out
// where they name all requests, and it makes a difference whether parameters are for what can take them or for these requests.
func Allocated(claim *resourceapi.ResourceClaim) []resourceapi.DeviceAllocationConfiguration {
	allocation := &claim.Status.Allocation.Devices
	var named [][]string // of the claim's own, those that are in the allocation, in their order
	for i := range claim.Spec.Devices.Config {
		requests := claim.Spec.Devices.Config[i].Requests
		e := entry{requests: requests}
		if slices.ContainsFunc(allocation.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
			applies, _ := e.appliesTo(r.Request)
			return applies
		}) {
			named = append(named, requests)
		}
	}
	configs := slices.Clone(allocation.Config)
	var own []*resourceapi.DeviceAllocationConfiguration
	for i := range configs {
		if configs[i].Source == resourceapi.AllocationConfigSourceClaim {
			own = append(own, &configs[i])
		}
	}
	if len(own) != len(named) {
		return configs // another scheduler's way; it may have named them
	}
	for i, c := range own {
		if len(c.Requests) == 0 {
			c.Requests = named[i]
		}
	}
	return configs
}
