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

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/source"
	"stowage.dev/stowage/pkg/plugins/config"
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

// syncTimeout is how long one scheduling attempt waits for the first lists of claims, slices and classes.
const syncTimeout = 10 * time.Second

// Shared is what all profiles of one scheduler have in common: one tracker, one inventory, one set of
// waiting pods. The first plugin created with it starts it.
type Shared struct {
	life
	factory informers.SharedInformerFactory

	tracker *tracker.Tracker
	store   *inventory.Store
	source  *source.Source
	waiting *waiting.Pods
	// books are what is known of claims that are about to be written.
	books *binding.Books
	// memory is what is remembered of single pods.
	memory *podmemory.Memory
	// common is what is known of pods that compete for devices.
	common *contention.Common
	// gated are the pods that PreEnqueue keeps back.
	gated  *gate.Pods
	leader leader
	room   wakeup.Options
	limits Limits
	// shares is the time that namespaces have.
	shares *searchtime.Shares
}

// life is the beginning and the end of a scheduler.
type life struct {
	startOnce sync.Once
	startErr  error
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
	return &Shared{limits: limits, shares: searchtime.NewShares(time.Now, limits.Evaluation), room: waiting.Options(limits.WakeUp)}
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
	s.store = inventory.NewStore(inventory.Options{OwnTaint: ownership.TaintKey, Features: inventory.Features{
		PartitionableDevices:    enabled(features.DRAPartitionableDevices),
		ConsumableCapacity:      enabled(features.DRAConsumableCapacity),
		FractionalCapacityRange: enabled(features.DRAFractionalCapacityRange),
		ListTypeAttributes:      enabled(features.DRAListTypeAttributes),
		CompatibilityGroups:     enabled(features.DRADeviceCompatibilityGroups),
		OptionalNodeOperations:  enabled(features.DRAOptionalNodeOperations),
		DerivedAttributes:       enabled(features.DRADerivedAttributes),
	}})
	caches.store.Store(s.store)
	s.tracker = tracker.New(klog.FromContext(ctx), tracker.WithJudge(fence.NewJudge(s.store.View)))
	pods := s.factory.Core().V1().Pods().Lister()
	s.memory = podmemory.New(pods)
	s.waiting = waiting.NewPods(s.room, pods, s.factory.Core().V1().Nodes().Lister(), s.tracker, s.store)
	s.books = binding.NewBooks(s.ctx, s.tracker, s.waiting.Watch)
	s.common = &contention.Common{
		Claims: s.tracker, Pods: pods, Devices: s.store.View, Attempts: s.memory.Attempts, Leaving: s.memory.Leaving,
		Nominations: contention.NewNominations(pods, s.waiting.NominationEnded, s.waiting.NominationLost), Trial: &contention.Trial{},
	}
	s.gated = gate.New(pods)
	context.AfterFunc(s.ctx, s.gated.Queue.ShutDown)

	var err error
	for _, handler := range []cache.ResourceEventHandler{
		s.waiting.PodHandler(), s.memory.Attempts.PodHandler(), s.memory.Failed.PodHandler(), contention.VictimHandler(ctx, handle, s.tracker), s.gated.PodHandler(s.ctx),
		s.common.Nominations.PodHandler(),
	} {
		if _, err = s.factory.Core().V1().Pods().Informer().AddEventHandler(byUID{handler}); err != nil {
			s.cancel()
			return fmt.Errorf("watch pods: %w", err)
		}
	}
	s.source, err = source.New(s.ctx, handle.ClientSet(), withSharedSliceIndex(s.factory), s.store, source.Options{
		DeviceTaintRules:   enabled(features.DRADeviceTaintRules),
		ConsumableCapacity: enabled(features.DRAConsumableCapacity),
	})
	if err != nil {
		s.cancel()
		return fmt.Errorf("watch devices: %w", err)
	}

	s.leader.auditor = auditing.New(s.tracker, s.store.View, handle, args.AuditPeriod.Duration, args.BindingTimeout.Duration, args.Fence.Timeout.Duration, clock.RealClock{})
	s.leader.auditor.Disclosure = args.ClaimsOfOtherNamespaces
	if enabled(features.DRADeviceTaintRules) {
		s.leader.owner = ownership.NewKeeper(s.ctx, handle.ClientSet().ResourceV1(), s.factory.Resource().V1().DeviceTaintRules())
	}

	// Subscribed before anything runs, so that no change is missed.
	s.tracker.Subscribe(s.waiting.OnClaimEvent)
	s.tracker.Subscribe(s.common.Nominations.OnClaimEvent)
	s.tracker.Subscribe(func(event tracker.Event) { s.memory.Leaving.OnClaimEvent(klog.FromContext(ctx), event) })
	s.source.AddListener(s.waiting.OnInventoryEvent)
	s.source.AddListener(s.common.Nominations.OnInventoryEvent)
	s.wg.Go(func() { s.tracker.Run(s.ctx, tracker.NewListWatch(handle.ClientSet())) })
	s.wg.Go(func() { s.waiting.Run(s.ctx) })
	s.wg.Go(func() { <-s.source.Done() })
	return nil
}

// byUID takes the events of pods. One that was deleted and made anew under its name while the informer did not hear is two pods, not one that
// was updated.
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
			s.tracker.Subscribe(s.leader.auditor.OnClaimEvent) // it begins with all that is held
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

// waitForSync waits until claims, slices and classes have been listed once. Before that, devices seem to be
// free that are not, and devices are missing that exist.
func (s *Shared) waitForSync(ctx context.Context) error {
	if s.hasSynced() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	if err := s.source.WaitForSync(ctx); err != nil {
		return err
	}
	return s.tracker.WaitForSync(ctx)
}

func (s *Shared) hasSynced() bool { return s.tracker.HasSynced() && s.source.HasSynced() }

func enabled(gate featuregate.Feature) bool { return utilfeature.DefaultFeatureGate.Enabled(gate) }
