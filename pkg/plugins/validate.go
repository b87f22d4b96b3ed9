package plugins

import (
	"errors"
	"fmt"
	"maps"
	"slices"

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
// of a scheduler before that scheduler runs; the profiles know which plugins are enabled after all defaults,
// and in which order. The error says what is wrong with which profile, and shows what it has to look like.
//
//   - All profiles use DeviceClaims, or none. Pods of a profile without any plugin for claims would be bound
//     without devices, and kube-scheduler's own plugin DynamicResources beside DeviceClaims would hand out
//     devices that the other one has handed out already.
//   - DeviceClaims is enabled at every extension point that it has.
//   - In postFilter it comes before DefaultPreemption, so that an unused allocation is given up before pods are
//     evicted. In podGroupPostFilter, too, if feature gate GenericWorkload is enabled.
//   - In preBind it comes before VolumeBinding, so that no volume pins the pod to a node before the pod has its
//     devices.
func Validate(profiles profile.Map) error {
	used := false
	for _, p := range profiles {
		used = used || uses(p.ListPlugins(), deviceclaims.Name)
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(profiles)) {
		for _, err := range check(profiles[name].ListPlugins(), used) {
			errs = append(errs, fmt.Errorf("profile %q: %w", name, err))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return fmt.Errorf("the scheduler configuration cannot be used:\n%w\nEvery profile needs\n%s", errors.Join(errs...), configFragment)
}

// check returns what is wrong with one profile. usedByAny tells whether any profile of the scheduler uses
// DeviceClaims.
func check(plugins *config.Plugins, usedByAny bool) []error {
	ours, inTree := uses(plugins, deviceclaims.Name), uses(plugins, names.DynamicResources)
	switch {
	case !ours && !usedByAny && inTree:
		return nil // a scheduler without DeviceClaims
	case ours && inTree:
		return []error{errors.New("DynamicResources is enabled beside DeviceClaims: disable DynamicResources in multiPoint")}
	case inTree:
		return []error{errors.New("DynamicResources is enabled here and DeviceClaims in another profile, both would hand out the same devices: use DeviceClaims in all profiles")}
	case !ours:
		return []error{errors.New("neither DeviceClaims nor DynamicResources is enabled, pods with claims would run without devices: enable DeviceClaims")}
	}

	var errs []error
	for _, point := range extensionPoints(plugins) {
		if point.required && index(point.set, deviceclaims.Name) < 0 {
			errs = append(errs, fmt.Errorf("DeviceClaims is not enabled in %s: enable it in multiPoint and do not disable it anywhere", point.name))
		}
	}
	if !before(plugins.PostFilter, deviceclaims.Name, names.DefaultPreemption) {
		errs = append(errs, errors.New("in postFilter, DeviceClaims comes after DefaultPreemption: enable DeviceClaims in postFilter explicitly, before it"))
	}
	if utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload) && !before(plugins.PodGroupPostFilter, deviceclaims.Name, names.DefaultPreemption) {
		errs = append(errs, errors.New("in podGroupPostFilter, DeviceClaims comes after DefaultPreemption: enable DeviceClaims in podGroupPostFilter explicitly, before it"))
	}
	if !before(plugins.PreBind, deviceclaims.Name, names.VolumeBinding) {
		errs = append(errs, errors.New("in preBind, DeviceClaims comes after VolumeBinding: enable DeviceClaims in preBind explicitly, before it"))
	}
	return errs
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
