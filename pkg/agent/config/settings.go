// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Settings are what a device is set up with: the parameters with their defaults, validated. The zero value
// is a device as it is, for whole GPUs and MIG devices alike.
type Settings struct {
	// Strategy is empty if nothing was asked for.
	Strategy Strategy
	// Interval is set for TimeSlicing of whole GPUs.
	Interval Interval
	// MPS is set for that strategy.
	MPS *Limits
	// VFIO of a GPU that a virtual machine gets.
	VFIO VFIO
}

// Setup names what the settings make of a whole GPU. It is the same for all claims that share one.
func (s Settings) Setup() string {
	if s.Strategy == "" || s.Strategy == TimeSlicing {
		return fmt.Sprintf("%s (%s)", TimeSlicing, cmp.Or(s.Interval, IntervalDefault))
	}
	return string(s.Strategy)
}

// Limits that an MPS daemon puts on each of its clients, and who these may be.
type Limits struct {
	// ActiveThreadPercentage of a device, 1 to 100; 0 for no limit.
	ActiveThreadPercentage int
	// MemoryMiB of each device; 0 for no limit.
	MemoryMiB int64
	// PerDevice overrides MemoryMiB, by the device's UUID or its index among the claim's devices.
	PerDevice map[string]int64
	// MultiUser is that processes of several users are served at once. Else those of a second user wait until the first has none.
	MultiUser bool
}

// MemoryOf returns the limits in MiB of the devices with these UUIDs, in their order, 0 for no limit. A limit for a
// device that is not among them is an error.
func (l *Limits) MemoryOf(uuids []string) ([]int64, error) {
	limits := make([]int64, len(uuids))
	for i := range limits {
		limits[i] = l.MemoryMiB
	}
	named := map[int]string{}
	for _, key := range slices.Sorted(maps.Keys(l.PerDevice)) {
		i := slices.Index(uuids, key)
		if n, err := strconv.Atoi(key); err == nil && n < len(uuids) {
			i = n
		}
		if i < 0 {
			return nil, fmt.Errorf("sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[%q]: the claim has no such device, only %d with "+
				"the UUIDs %s", key, len(uuids), strings.Join(uuids, ", "))
		}
		if other, twice := named[i]; twice {
			return nil, fmt.Errorf("sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[%q]: %q is the same device", key, other)
		}
		named[i] = key
		limits[i] = l.PerDevice[key]
	}
	return limits, nil
}

func (c *gpuConfig) settings() (Settings, error) {
	if c.Sharing == nil {
		return Settings{}, nil
	}
	s := Settings{Strategy: c.Sharing.Strategy}
	var err error
	switch s.Strategy {
	case TimeSlicing:
		s.Interval, err = c.Sharing.TimeSlicingConfig.interval()
	case MPS:
		s.MPS, err = c.Sharing.MPSConfig.limits()
	case Exclusive:
	default:
		err = unknown("sharing.strategy", s.Strategy, TimeSlicing, MPS, Exclusive)
	}
	return s, cmp.Or(err,
		onlyFor(c.Sharing.TimeSlicingConfig != nil, "sharing.timeSlicingConfig", s.Strategy, TimeSlicing),
		onlyFor(c.Sharing.MPSConfig != nil, "sharing.mpsConfig", s.Strategy, MPS))
}

func (c *migDeviceConfig) settings() (Settings, error) {
	if c.Sharing == nil {
		return Settings{}, nil
	}
	s := Settings{Strategy: c.Sharing.Strategy}
	var err error
	switch s.Strategy {
	case TimeSlicing:
		// A MIG device has no interval of its own; its processes take turns by themselves.
	case MPS:
		s.MPS, err = c.Sharing.MPSConfig.limits()
	case Exclusive: // for whole GPUs only
		fallthrough
	default:
		err = unknown("sharing.strategy", s.Strategy, TimeSlicing, MPS)
	}
	return s, cmp.Or(err, onlyFor(c.Sharing.MPSConfig != nil, "sharing.mpsConfig", s.Strategy, MPS))
}

// interval of a configuration that may be missing.
func (c *timeSlicingConfig) interval() (Interval, error) {
	if c == nil || c.Interval == nil {
		return IntervalDefault, nil
	}
	if !slices.Contains(intervals, *c.Interval) {
		return "", unknown("sharing.timeSlicingConfig.interval", *c.Interval, intervals...)
	}
	return *c.Interval, nil
}

// limits of a configuration that may be missing.
func (c *mpsConfig) limits() (*Limits, error) {
	l := &Limits{}
	if c == nil {
		return l, nil
	}
	if p := c.DefaultActiveThreadPercentage; p != nil {
		if *p < 1 || *p > 100 {
			return nil, fmt.Errorf("sharing.mpsConfig.defaultActiveThreadPercentage: %d: want 1 to 100", *p)
		}
		l.ActiveThreadPercentage = *p
	}
	l.MultiUser = c.MultiUser != nil && *c.MultiUser
	if q := c.DefaultPinnedDeviceMemoryLimit; q != nil {
		var err error
		if l.MemoryMiB, err = q.mebibytes(); err != nil {
			return nil, fmt.Errorf("sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: %w", err)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.PerDevicePinnedMemoryLimit)) {
		field := fmt.Sprintf("sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[%q]", key)
		if !deviceKey.MatchString(key) {
			return nil, fmt.Errorf("%s: want the UUID of a device, or its index", field)
		}
		limit, err := c.PerDevicePinnedMemoryLimit[key].mebibytes()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", field, err)
		}
		if l.PerDevice == nil {
			l.PerDevice = map[string]int64{}
		}
		l.PerDevice[key] = limit
	}
	return l, nil
}

var (
	deviceKey = regexp.MustCompile(`^(0|[1-9][0-9]{0,2}|(GPU|MIG)-[0-9A-Za-z/-]{1,80})$`)
	// plainQuantity leaves out exponents: with a large one, parsing would take for ever.
	plainQuantity = regexp.MustCompile(`^[0-9]{1,15}(\.[0-9]{1,6})?(Ki|Mi|Gi|Ti|k|M|G|T)?$`)
)

// The least and the most of a limit: the MPS daemon takes whole mebibytes, and no GPU has a pebibyte.
var leastLimit, mostLimit = resource.MustParse("1Mi"), resource.MustParse("1Pi")

// mebibytes rounds down: the MPS daemon takes whole ones.
func (q quantity) mebibytes() (int64, error) {
	text := string(q)
	if strings.HasPrefix(text, `"`) {
		if err := json.Unmarshal([]byte(q), &text); err != nil {
			return 0, err
		}
	} else if _, err := strconv.ParseInt(text, 10, 64); err != nil {
		text = "" // not a number, or one with a fraction or an exponent
	}
	value := short([]byte(q))
	if !plainQuantity.MatchString(text) {
		return 0, fmt.Errorf("%s: want a number of bytes such as 512Mi or 10Gi", value)
	}
	parsed, err := resource.ParseQuantity(text)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", value, err)
	}
	if parsed.Cmp(leastLimit) < 0 || parsed.Cmp(mostLimit) > 0 {
		return 0, fmt.Errorf("%s: want a number of bytes, at least 1Mi and at most 1Pi", value)
	}
	return parsed.Value() >> 20, nil
}

func unknown[T ~string](field string, value T, known ...T) error {
	names := make([]string, 0, len(known))
	for _, k := range known {
		names = append(names, string(k))
	}
	return fmt.Errorf("%s: %q: want one of %s", field, value, strings.Join(names, ", "))
}

// onlyFor refuses parameters of another strategy, which would have no effect.
func onlyFor(set bool, field string, strategy, of Strategy) error {
	if set && strategy != of {
		return fmt.Errorf("%s: only the strategy %s has it, and the strategy is %q", field, of, strategy)
	}
	return nil
}
