// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/featuregate"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/account"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/auditing"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/gate"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podmemory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/searchtime"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/waiting"
	"stowage.dev/stowage/pkg/plugins/ownership"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/wakeup"
)

// Shared is what all profiles of one scheduler have in common: one tracker, one inventory, one set of
// waiting pods. The first plugin created with it starts it.
type Shared struct {
	// Reading may be set before the first plugin is created.
	Reading Reading
	life
	bounds
	leader leader

	account *account.Account
	waiting *waiting.Pods
	// books are what is known of claims that are about to be written.
	books *binding.Books
	// memory is what is remembered of single pods.
	memory *podmemory.Memory
	// common is what is known of pods that compete for devices.
	common *contention.Common
	// gated are the pods that PreEnqueue keeps back.
	gated *gate.Pods
}

// Reading is what is unusual about how a scheduler reads the cluster: a simulation has all objects in memory.
type Reading struct {
	// Claims lists and watches ResourceClaims. Nil is the scheduler's client.
	Claims cache.ListerWatcher
	// NoTaintRules says that the cluster has no DeviceTaintRules and gets none. The index of devices that they need is a large part of
	// what is made of the slices at the start.
	NoTaintRules bool
}

// bounds are those of the time that things may take.
type bounds struct {
	limits Limits
	room   wakeup.Options
	// shares is the time that namespaces have.
	shares *searchtime.Shares
}

// life is the beginning and the end of a scheduler.
type life struct {
	startOnce sync.Once
	startErr  error
	factory   informers.SharedInformerFactory
	// ctx ends with the scheduler.
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// leader is what only a scheduler that leads does.
type leader struct {
	once    sync.Once
	auditor *auditing.Auditor
	owner   *ownership.Keeper // nil if there are no DeviceTaintRules
}

// NewShared returns a Shared for one scheduler.
func NewShared(limits Limits) *Shared {
	limits = limits.withDefaults()
	return &Shared{bounds: bounds{
		limits: limits, shares: searchtime.NewShares(time.Now, limits.Evaluation),
		room: waiting.Options(limits.WakeUp),
	}}
}

// start starts everything with the clients of the first plugin's scheduler, and with the first plugin's arguments where
// they are about what the profiles share. Later plugins must belong to the same scheduler.
func (s *Shared) start(ctx context.Context, handle fwk.Handle, args *config.DeviceClaimsArgs) error {
	s.startOnce.Do(func() { s.startErr = s.run(ctx, handle, args) })
	if s.startErr != nil {
		return s.startErr
	}
	if handle.SharedInformerFactory() != s.factory {
		return errors.New("the plugin registry is in use by another scheduler of this process: make a registry for each scheduler")
	}
	return nil
}

func (s *Shared) run(ctx context.Context, handle fwk.Handle, args *config.DeviceClaimsArgs) error {
	registerMetrics()
	s.factory = handle.SharedInformerFactory()
	s.ctx, s.cancel = context.WithCancel(ctx)
	var err error
	if s.account, err = account.New(s.ctx, handle.ClientSet(), s.factory, !s.Reading.NoTaintRules); err != nil {
		s.cancel()
		return err
	}
	pods := s.factory.Core().V1().Pods().Lister()
	s.memory = podmemory.New(pods)
	s.waiting = waiting.NewPods(s.room, pods, s.factory.Core().V1().Nodes().Lister(), s.account.Tracker, s.account.Store)
	s.books = binding.NewBooks(s.ctx, s.account.Tracker, s.waiting.Watch)
	s.common = &contention.Common{
		Claims: s.account.Tracker, Pods: pods, Devices: s.account.Store.View, Attempts: s.memory.Attempts, Leaving: s.memory.Leaving,
		Nominations: contention.NewNominations(pods, s.waiting.NominationEnded, s.waiting.NominationLost), Trial: &contention.Trial{},
	}
	s.gated = gate.New(pods)
	context.AfterFunc(s.ctx, s.gated.Queue.ShutDown)

	for _, handler := range []cache.ResourceEventHandler{
		s.waiting.PodHandler(), s.memory.Attempts.PodHandler(), s.memory.Failed.PodHandler(),
		contention.VictimHandler(ctx, handle, s.account.Tracker), s.gated.PodHandler(s.ctx),
		s.common.Nominations.PodHandler(),
	} {
		if _, err = s.factory.Core().V1().Pods().Informer().AddEventHandler(byUID{handler}); err != nil {
			s.cancel()
			return fmt.Errorf("watch pods: %w", err)
		}
	}

	s.leader.auditor = auditing.New(s.account.Tracker, s.account.Store.View, handle, args.AuditPeriod.Duration, args.BindingTimeout.Duration,
		args.Fence.Timeout.Duration, clock.RealClock{})
	s.leader.auditor.Disclosure = args.ClaimsOfOtherNamespaces
	if enabled(features.DRADeviceTaintRules) {
		s.leader.owner = ownership.NewKeeper(s.ctx, handle.ClientSet().ResourceV1(), s.factory.Resource().V1().DeviceTaintRules())
	}

	// Subscribed before anything runs, so that no change is missed.
	s.account.Tracker.Subscribe(s.waiting.OnClaimEvent)
	s.account.Tracker.Subscribe(s.common.Nominations.OnClaimEvent)
	s.account.Tracker.Subscribe(func(event tracker.Event) { s.memory.Leaving.OnClaimEvent(klog.FromContext(ctx), event) })
	s.account.Source.AddListener(s.waiting.OnInventoryEvent)
	s.account.Source.AddListener(s.common.Nominations.OnInventoryEvent)
	claims := s.Reading.Claims
	if claims == nil {
		claims = tracker.NewListWatch(handle.ClientSet())
	}
	s.wg.Go(func() { s.account.Run(s.ctx, claims) })
	s.wg.Go(func() { s.waiting.Run(s.ctx) })
	return nil
}

// byUID takes the events of pods. One that was deleted and made anew under its name while the informer did not
// hear is two pods, not one that was updated. One that was only deleted meanwhile is told as it was last known.
type byUID struct{ cache.ResourceEventHandler }

// OnUpdate implements [cache.ResourceEventHandler].
func (h byUID) OnUpdate(before, after any) {
	gone, wasPod := before.(*v1.Pod)
	pod, isPod := after.(*v1.Pod)
	if wasPod && isPod && gone.UID != pod.UID {
		h.OnDelete(gone)
		h.OnAdd(pod, false)
		return
	}
	h.ResourceEventHandler.OnUpdate(before, after)
}

// OnDelete implements [cache.ResourceEventHandler].
func (h byUID) OnDelete(gone any) {
	if tombstone, ok := gone.(cache.DeletedFinalStateUnknown); ok {
		gone = tombstone.Obj
	}
	h.ResourceEventHandler.OnDelete(gone)
}

// own has the rule of a profile kept as its arguments want it, from when the scheduler leads.
func (s *Shared) own(profile string, args *config.OwnershipArgs) error {
	rule, err := ownership.Rule(profile, args)
	if err != nil {
		return fmt.Errorf("args: ownership: %w", err)
	}
	if s.leader.owner == nil {
		if rule != nil {
			return fmt.Errorf("args: ownership.enabled: Invalid value: true: needs feature gate %s", features.DRADeviceTaintRules)
		}
		return nil
	}
	name, err := ownership.RuleName(profile)
	if err != nil {
		return nil // no rule can be this profile's, so there is none to remove
	}
	s.leader.owner.Want(name, rule)
	return nil
}

// Lead begins what only a scheduler that leads may do: of several replicas, one tells pods why they are kept back, audits, and keeps the
// rule that keeps other schedulers off our devices.
func (s *Shared) Lead() {
	s.leader.once.Do(func() {
		if s.ctx.Err() == nil {
			s.wg.Go(func() { s.gated.Run(s.ctx) })
			s.account.Tracker.Subscribe(s.leader.auditor.OnClaimEvent) // it begins with all that is held
			s.wg.Go(func() { s.leader.auditor.Run(s.ctx) })
		}
		if s.leader.owner != nil && s.ctx.Err() == nil {
			s.wg.Go(func() { s.leader.owner.Run(s.ctx) })
		}
	})
}

// stop ends all goroutines and waits for them.
func (s *Shared) stop() {
	if s.cancel != nil {
		s.cancel()
	}
	s.wg.Wait()
}

func enabled(gate featuregate.Feature) bool { return utilfeature.DefaultFeatureGate.Enabled(gate) }
