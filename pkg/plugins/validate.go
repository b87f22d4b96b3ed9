// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"
	"k8s.io/kubernetes/pkg/scheduler/profile"

	"stowage.dev/stowage/pkg/plugins/deviceclaims"
)

// configFragment is what every profile's plugins have to look like. Plugins that are enabled in multiPoint come
// after kube-scheduler's default plugins, so the points where the order counts name the plugin again.
const configFragment = `plugins:
  multiPoint:
    enabled:
    - name: DeviceClaims
    disabled:
    - name: DynamicResources
  filter:
    enabled:
    - name: NodeUnschedulable
    - name: NodeName
    - name: TaintToleration
    - name: NodeAffinity
    - name: DeviceClaims
  postFilter:
    enabled:
    - name: DeviceClaims
  podGroupPostFilter:
    enabled:
    - name: DeviceClaims
  preBind:
    enabled:
    - name: DeviceClaims`

// Validate refuses sets of profiles in which DeviceClaims cannot keep its promises. Call it with the profiles
// of a scheduler before that scheduler runs. The error has all findings of [Check] that are no warnings, and shows
// what a profile has to look like.
func Validate(profiles profile.Map) error {
	var errs []error
	for _, finding := range Check(profiles) {
		if !finding.Warning {
			errs = append(errs, errors.New(finding.String()))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return fmt.Errorf("the scheduler configuration cannot be used:\n%w\nEvery profile needs\n%s", errors.Join(errs...), configFragment)
}

// Check returns what is wrong with profiles. The profiles know which plugins are enabled after all defaults, and in
// which order. These are refused:
//
//   - All profiles use DeviceClaims, or none. Pods of a profile without any plugin for claims would be bound
//     without devices, and kube-scheduler's own plugin DynamicResources beside DeviceClaims would hand out
//     devices that the other one has handed out already.
//   - DeviceClaims is enabled at every extension point that it has.
//   - In postFilter it comes before DefaultPreemption, so that an unused allocation is given up before pods are
//     evicted. In podGroupPostFilter, too, if feature gate GenericWorkload is enabled.
//   - In preBind it comes before VolumeBinding, so that no volume pins the pod to a node before the pod has its
//     devices.
//
// The order in filter is a warning: pods get the same devices in any order, and preemption looks at more nodes than
// it has to.
func Check(profiles profile.Map) []Finding {
	used := usedByAny(profiles)
	var findings []Finding
	for _, name := range slices.Sorted(maps.Keys(profiles)) {
		for _, finding := range check(profiles[name].ListPlugins(), used) {
			finding.Profile = name
			findings = append(findings, finding)
		}
	}
	return findings
}

// usedByAny tells whether any of the profiles uses DeviceClaims.
func usedByAny(profiles profile.Map) bool {
	for _, p := range profiles {
		if uses(p.ListPlugins(), deviceclaims.Name) {
			return true
		}
	}
	return false
}

// check returns what is wrong with one profile. usedByAny tells whether any profile of the scheduler uses
// DeviceClaims.
func check(plugins *config.Plugins, usedByAny bool) []Finding {
	ours, inTree := uses(plugins, deviceclaims.Name), uses(plugins, names.DynamicResources)
	var findings []Finding
	switch {
	case !ours && !usedByAny && inTree:
		return nil // a scheduler without DeviceClaims
	case ours && inTree:
		findings = append(findings, Finding{
			Plugin: names.DynamicResources, Field: "plugins.multiPoint.disabled",
			Problem: "DynamicResources is enabled beside DeviceClaims", Change: "disable DynamicResources in multiPoint",
		})
	case inTree:
		return []Finding{{
			Plugin: names.DynamicResources, Field: "plugins.multiPoint",
			Problem: "DynamicResources is enabled here and DeviceClaims in another profile, both would hand out the same devices",
			Change:  "use DeviceClaims in all profiles",
		}}
	case !ours:
		return []Finding{{
			Plugin: deviceclaims.Name, Field: "plugins.multiPoint.enabled",
			Problem: "neither DeviceClaims nor DynamicResources is enabled, pods with claims would run without devices",
			Change:  "enable DeviceClaims",
		}}
	}

	for _, point := range extensionPoints(plugins) {
		if point.required && index(point.set, deviceclaims.Name) < 0 {
			findings = append(findings, Finding{
				Plugin: deviceclaims.Name, Field: "plugins." + point.name + ".enabled", Value: listed(point.set),
				Problem: "DeviceClaims is not enabled in " + point.name, Change: "enable it in multiPoint and do not disable it anywhere",
			})
		}
	}
	order := func(point string, set config.PluginSet, other string) {
		if !before(set, deviceclaims.Name, other) {
			findings = append(findings, Finding{
				Plugin: deviceclaims.Name, Field: "plugins." + point + ".enabled", Value: listed(set),
				Problem: fmt.Sprintf("in %s, DeviceClaims comes after %s", point, other),
				Change:  fmt.Sprintf("enable DeviceClaims in %s explicitly, before it", point),
			})
		}
	}
	order("postFilter", plugins.PostFilter, names.DefaultPreemption)
	if utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload) {
		order("podGroupPostFilter", plugins.PodGroupPostFilter, names.DefaultPreemption)
	}
	order("preBind", plugins.PreBind, names.VolumeBinding)
	return append(findings, checkFilter(plugins.Filter)...)
}

// unresolvable are the Filter plugins whose refusal no eviction changes, and that look at nothing but the node.
var unresolvable = []string{names.NodeUnschedulable, names.NodeName, names.TaintToleration, names.NodeAffinity}

// checkFilter warns of an order in Filter that costs preemption time. The framework stops at the first plugin that
// refuses a node, and preemption tries the node again if evictions may change that plugin's mind.
func checkFilter(set config.PluginSet) []Finding {
	warning := Finding{
		Plugin: deviceclaims.Name, Field: "plugins.filter.enabled", Value: listed(set), Warning: true,
		Change: fmt.Sprintf("list in filter: %s, %s", strings.Join(unresolvable, ", "), deviceclaims.Name),
	}
	var findings []Finding
	if !before(set, deviceclaims.Name, names.NodeResourcesFit) {
		warning.Problem = "in filter, DeviceClaims comes after NodeResourcesFit: preemption tries nodes whose devices no eviction frees"
		findings = append(findings, warning)
	}
	var late []string
	for _, name := range unresolvable {
		if index(set, deviceclaims.Name) >= 0 && index(set, name) > index(set, deviceclaims.Name) {
			late = append(late, name)
		}
	}
	if len(late) > 0 {
		warning.Problem = fmt.Sprintf("in filter, DeviceClaims comes before %s: preemption tries nodes that the pod cannot use",
			strings.Join(late, ", "))
		findings = append(findings, warning)
	}
	return findings
}

// listed are the plugins of a set in their order.
func listed(set config.PluginSet) string {
	var list []string
	for _, plugin := range set.Enabled {
		list = append(list, plugin.Name)
	}
	return strings.Join(list, ", ")
}

// extensionPoint is one extension point of a profile.
type extensionPoint struct {
	name string
	set  config.PluginSet
	// required tells that DeviceClaims does not work without it.
	required bool
}

func extensionPoints(p *config.Plugins) []extensionPoint {
	return []extensionPoint{
		{"preEnqueue", p.PreEnqueue, true},
		{"preFilter", p.PreFilter, true},
		{"filter", p.Filter, true},
		{"postFilter", p.PostFilter, true},
		{"score", p.Score, true},
		{"reserve", p.Reserve, true},
		{"preBind", p.PreBind, true},
		{"podGroupPostFilter", p.PodGroupPostFilter, utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload)},
	}
}

// uses tells whether a plugin is enabled at any extension point that a plugin for claims may have.
func uses(plugins *config.Plugins, name string) bool {
	return slices.ContainsFunc(extensionPoints(plugins), func(point extensionPoint) bool {
		return index(point.set, name) >= 0
	})
}

// before tells whether the first plugin comes before the second one. A plugin that is not enabled is not in the
// wrong place.
func before(set config.PluginSet, first, second string) bool {
	i, j := index(set, first), index(set, second)
	return i < 0 || j < 0 || i < j
}

func index(set config.PluginSet, name string) int {
	return slices.IndexFunc(set.Enabled, func(p config.Plugin) bool { return p.Name == name })
}
