// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package account knows which devices exist and who holds them: the inventory and the tracker of one scheduler, and what feeds them.
// It does not know who asks.
package account

import (
	"context"
	"fmt"
	"time"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/featuregate"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/features"

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/source"
	"stowage.dev/stowage/pkg/plugins/ownership"
	"stowage.dev/stowage/pkg/tracker"
)

// syncTimeout is how long one scheduling attempt waits for the first lists of claims, slices and classes.
const syncTimeout = 10 * time.Second

// Account is that of one scheduler.
type Account struct {
	Tracker *tracker.Tracker
	Store   *inventory.Store
	Source  *source.Source
}

// New returns an account that is kept until ctx ends. It knows nothing before [Account.Run] and before the factory is started, so who
// subscribes before that misses no change. Without taintRules it does not look at DeviceTaintRules.
func New(ctx context.Context, client kubernetes.Interface, factory informers.SharedInformerFactory, taintRules bool) (*Account, error) {
	enabled := func(gate featuregate.Feature) bool { return utilfeature.DefaultFeatureGate.Enabled(gate) }
	a := &Account{Store: inventory.NewStore(inventory.Options{OwnTaint: ownership.TaintKey, Features: inventory.Features{
		PartitionableDevices:    enabled(features.DRAPartitionableDevices),
		ConsumableCapacity:      enabled(features.DRAConsumableCapacity),
		FractionalCapacityRange: enabled(features.DRAFractionalCapacityRange),
		ListTypeAttributes:      enabled(features.DRAListTypeAttributes),
		CompatibilityGroups:     enabled(features.DRADeviceCompatibilityGroups),
		OptionalNodeOperations:  enabled(features.DRAOptionalNodeOperations),
		DerivedAttributes:       enabled(features.DRADerivedAttributes),
	}})}
	Caches.store.Store(a.Store)
	a.Tracker = tracker.New(klog.FromContext(ctx), tracker.WithJudge(fence.NewJudge(a.Store.View)))
	var err error
	a.Source, err = source.New(ctx, client, sharedSliceIndex{factory.Resource().V1()}, a.Store, source.Options{
		DeviceTaintRules:   taintRules && enabled(features.DRADeviceTaintRules),
		ConsumableCapacity: enabled(features.DRAConsumableCapacity),
	})
	if err != nil {
		return nil, fmt.Errorf("watch devices: %w", err)
	}
	return a, nil
}

// Run keeps the account until ctx, which is that of New, ends and all has stopped. It lists and watches ResourceClaims with claims.
func (a *Account) Run(ctx context.Context, claims cache.ListerWatcher) {
	a.Tracker.Run(ctx, claims)
	<-a.Source.Done()
}

// WaitForSync waits until claims, slices and classes have been listed once. Before that, devices seem to be
// free that are not, and devices are missing that exist.
func (a *Account) WaitForSync(ctx context.Context) error {
	if a.HasSynced() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	if err := a.Source.WaitForSync(ctx); err != nil {
		return err
	}
	return a.Tracker.WaitForSync(ctx)
}

// HasSynced tells whether WaitForSync would return at once.
func (a *Account) HasSynced() bool { return a.Tracker.HasSynced() && a.Source.HasSynced() }
