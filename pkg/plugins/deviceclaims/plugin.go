// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package deviceclaims is the scheduler plugin DeviceClaims: it puts pods that use ResourceClaims on nodes
// whose devices satisfy the claims, and writes which devices each claim got. It takes the place of
// kube-scheduler's own plugin DynamicResources.
//
// It is an adapter with a file per extension point. What devices exist is known by pkg/inventory, who holds
// them by pkg/tracker, and which of them a claim gets is decided by pkg/allocator. The writes to the API, the
// wake-up of pods that could not be scheduled, and what is told of them are in rooms below internal. What is
// left for this package is the way of a pod through the scheduling framework.
//
// One [Shared] serves all profiles of a scheduler, because two accounts of who holds what cannot be kept
// consistent.
package deviceclaims

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	resourcelisters "k8s.io/client-go/listers/resource/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/holdings"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/passage"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/refusals"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/searchtime"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/waiting"
)

// Name is the plugin's name in scheduler configurations.
const Name = "DeviceClaims"

// Plugin is the plugin in one profile.
type Plugin struct {
	handle fwk.Handle
	shared *Shared
	binder *binding.Binder
	groups *podclaims.Groups

	extended *extended.Resources
	rivals   *contention.Rivals
	time     *searchtime.Profile

	setup    *waiting.Setup
	refusals *refusals.Finder
	holdings *holdings.Holdings
	passage  *passage.Passage
	// demand is what pods ask for, waits who waits for it.
	demand *demand.Reader
	waits  *waiting.Profile
	hints  *waiting.Hints
}

var (
	_ fwk.PreEnqueuePlugin         = &Plugin{}
	_ fwk.EnqueueExtensions        = &Plugin{}
	_ fwk.SignPlugin               = &Plugin{}
	_ fwk.PreFilterPlugin          = &Plugin{}
	_ fwk.PreFilterExtensions      = &Plugin{}
	_ fwk.FilterPlugin             = &Plugin{}
	_ fwk.PostFilterPlugin         = &Plugin{}
	_ fwk.ScorePlugin              = &Plugin{}
	_ fwk.ScoreExtensions          = &Plugin{}
	_ fwk.ReservePlugin            = &Plugin{}
	_ fwk.PreBindPlugin            = &Plugin{}
	_ fwk.PodGroupPostFilterPlugin = &Plugin{}
	_ fwk.PostBindPlugin           = &Plugin{}
)

// New returns the plugin for one profile. args is a [config.DeviceClaimsArgs], or nil for the defaults. The
// first call with a Shared starts it; it then runs until ctx ends or a plugin of it is closed.
func New(ctx context.Context, args runtime.Object, handle fwk.Handle, shared *Shared) (*Plugin, error) {
	typed, err := typedArgs(args)
	if err != nil {
		return nil, err
	}
	if gate := features.DRANodeAllocatableResources; utilfeature.DefaultFeatureGate.Enabled(gate) {
		return nil, fmt.Errorf("feature gate %s is enabled, but %s cannot account for devices that stand for CPU or memory of a node: disable it",
			gate, Name)
	}
	if err := shared.start(ctx, handle, typed); err != nil {
		return nil, err
	}
	if err := shared.own(handle.ProfileName(), typed.Ownership); err != nil {
		return nil, err
	}
	features := allocatorFeatures()
	pl := &Plugin{
		handle: handle,
		shared: shared,
		groups: podclaims.NewGroups(handle),
		binder: binding.New(shared.books, handle, features.DeviceBindingConditions, typed.BindingTimeout.Duration),
		time:   &searchtime.Profile{FilterTimeout: typed.FilterTimeout.Duration, Shares: shared.shares},
		setup:  waiting.NewSetup(handle),
	}
	pl.extended = &extended.Resources{Handle: handle, Claims: shared.account.Tracker, Recorded: shared.memory.Recorded, Binder: pl.binder}
	pl.rivals = &contention.Rivals{
		Common: shared.common, Handle: handle, Groups: pl.groups, Extended: pl.extended,
		Search: contention.Search{
			Features: features, Policy: policies[typed.ScoringStrategy.Devices],
			Scoring: scorings[typed.ScoringStrategy.Type], Time: pl.time,
		},
		NameAll: typed.ClaimsOfOtherNamespaces == config.NameClaims,
	}
	pl.demand = &demand.Reader{
		Claims: shared.account.Tracker, Places: shared.books.Places, Pods: pl.rivals,
		Extended: pl.extended, Features: features,
	}
	pl.waits = &waiting.Profile{
		Handle: handle, Setup: pl.setup, Demand: pl.demand, Rivals: pl.rivals, Binder: pl.binder, Places: shared.books.Places, Gate: shared.gated,
		Limit: shared.limits.WakeUp,
	}
	pl.hints = &waiting.Hints{Pods: shared.waiting, Extended: pl.extended}
	pl.passage = &passage.Passage{
		Fence: passage.NewFence(shared.account.Tracker, typed.Fence), Claims: shared.account.Tracker, Pods: shared.common.Pods,
		Binder: pl.binder, Groups: pl.groups,
		Attempts: shared.memory.Attempts, NameAll: pl.rivals.NameAll, Ended: shared.ctx,
	}
	pl.refusals = &refusals.Finder{
		Nodes: handle, Setup: pl.setup, Rules: taintRules(handle), Groups: pl.groups, Binder: pl.binder, Extended: pl.extended, Rivals: pl.rivals,
		HoldersLimit: shared.limits.Holders, ObstacleLimit: shared.limits.Obstacle,
	}
	pl.holdings = &holdings.Holdings{
		Claims: shared.account.Tracker, Binder: pl.binder, Groups: pl.groups, Extended: pl.extended,
		Attempts: shared.memory.Attempts, Refusals: pl.refusals,
	}
	shared.gated.Serve(handle, pl.holdings.GiveUpKeptBack)
	return pl, nil
}

// What the arguments' words mean to the allocator.
var (
	policies = map[config.DeviceOrder]allocator.Policy{
		config.FirstFit: allocator.FirstFit, config.SmallestFit: allocator.SmallestFit,
	}
	scorings = map[config.ScoringStrategyType]allocator.Scoring{
		config.MostAllocated: allocator.MostAllocated, config.LeastAllocated: allocator.LeastAllocated,
	}
)

func typedArgs(args runtime.Object) (*config.DeviceClaimsArgs, error) {
	typed := &config.DeviceClaimsArgs{}
	if args != nil {
		var ok bool
		if typed, ok = args.DeepCopyObject().(*config.DeviceClaimsArgs); !ok {
			return nil, fmt.Errorf("args have type %T, want *DeviceClaimsArgs", args)
		}
	}
	config.SetDefaultsDeviceClaimsArgs(typed)
	if err := config.ValidateDeviceClaimsArgs(typed); err != nil {
		return nil, fmt.Errorf("args: %w", err)
	}
	return typed, nil
}

// taintRules returns the DeviceTaintRules, nil without that feature.
func taintRules(handle fwk.Handle) resourcelisters.DeviceTaintRuleLister {
	if !enabled(features.DRADeviceTaintRules) {
		return nil
	}
	return handle.SharedInformerFactory().Resource().V1().DeviceTaintRules().Lister()
}

// allocatorFeatures follows the feature gates of the process.
func allocatorFeatures() allocator.Features {
	return allocator.Features{
		AdminAccess:     enabled(features.DRAAdminAccess),
		PrioritizedList: enabled(features.DRAPrioritizedList),
		DeviceTaints:    enabled(features.DRADeviceTaints),
		DeviceBindingConditions: enabled(features.DRADeviceBindingConditions) &&
			enabled(features.DRAResourceClaimDeviceStatus),
	}
}

// Name implements [fwk.Plugin].
func (pl *Plugin) Name() string { return Name }

// Close ends what runs in the background for all profiles, and waits for it. The scheduler calls it when it
// stops.
func (pl *Plugin) Close() error {
	pl.shared.stop()
	return nil
}
