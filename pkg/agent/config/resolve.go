package config

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

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
			return nil, fmt.Errorf("%s.source: %q: want %s or %s", path, c.Source, resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim)
		}
		path += fmt.Sprintf(".opaque.parameters (from the %s)", strings.ToLower(strings.TrimPrefix(string(c.Source), "From")))
		kind, settings, err := Decode(c.Opaque.Parameters.Raw)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
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
// are an error; those for all requests, or for all alternatives of one, are then meant for others.
func (s *Set) For(request string, kind Kind) (Settings, error) {
	var chosen *entry
	for i := range s.entries {
		e := &s.entries[i]
		applies, byName := e.appliesTo(request)
		if !applies {
			continue
		}
		if e.kind != kind {
			if byName {
				return Settings{}, fmt.Errorf("%s: kind: %s is not for the device of request %s, which takes a %s", e.path, e.kind, request, kind)
			}
			continue
		}
		if chosen == nil || e.fromClaim || !chosen.fromClaim {
			chosen = e
		}
	}
	if chosen == nil {
		return Settings{}, nil
	}
	return chosen.settings, nil
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
