// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"sync"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	resourceslicetracker "k8s.io/dynamic-resource-allocation/resourceslice/tracker"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources"
	"k8s.io/kubernetes/pkg/scheduler/util/assumecache"

	"stowage.dev/stowage/pkg/snapshot"
)

// draManager knows which class stands for which extended resource (KEP-5004). Claims and devices it reads when they are asked for, by the
// manager that kube-scheduler has. Only scores for extended resources ask, which few configurations have.
type draManager struct {
	fwk.SharedDRAManager
	classes *extendedresourcecache.ExtendedResourceCache
	factory informers.SharedInformerFactory
	read    func()
}

func newDRAManager(ctx context.Context, client kubernetes.Interface, objects *snapshot.Objects) (*draManager, error) {
	logger := klog.FromContext(ctx)
	factory := informers.NewSharedInformerFactory(client, 0)
	m := &draManager{classes: extendedresourcecache.NewExtendedResourceCache(logger), factory: factory}
	for _, class := range objects.DeviceClasses {
		m.classes.OnAdd(class, true)
	}
	register(factory, objects.ResourceClaims, cache.Indexers{})
	register(factory, objects.ResourceSlices, cache.Indexers{})
	resources := factory.Resource().V1()
	claims := assumecache.NewAssumeCache(logger, resources.ResourceClaims().Informer(), "ResourceClaim", "", nil)
	devices, err := resourceslicetracker.StartTracker(ctx, resourceslicetracker.Options{
		EnableDeviceTaintRules:   utilfeature.DefaultFeatureGate.Enabled(features.DRADeviceTaintRules),
		EnableConsumableCapacity: utilfeature.DefaultFeatureGate.Enabled(features.DRAConsumableCapacity),
		SliceInformer:            resources.ResourceSlices(), TaintInformer: resources.DeviceTaintRules(),
	})
	if err != nil {
		return nil, fmt.Errorf("simulate the scheduler's view of ResourceSlices: %w", err)
	}
	m.SharedDRAManager = dynamicresources.NewDRAManager(ctx, claims, devices, factory)
	m.read = sync.OnceFunc(func() {
		factory.Start(ctx.Done())
		factory.WaitForCacheSync(ctx.Done())
		// A cache of claims says through a handler whether it is synced.
		cache.WaitFor(ctx, "", claims.AddEventHandler(cache.ResourceEventHandlerFuncs{}).HasSyncedChecker(), devices.HasSyncedChecker())
	})
	return m, nil
}

func (m *draManager) DeviceClassResolver() fwk.DeviceClassResolver { return m.classes }

func (m *draManager) ResourceClaims() fwk.ResourceClaimTracker {
	m.read()
	return m.SharedDRAManager.ResourceClaims()
}

func (m *draManager) ResourceSlices() fwk.ResourceSliceLister {
	m.read()
	return m.SharedDRAManager.ResourceSlices()
}

func (m *draManager) DeviceClasses() fwk.DeviceClassLister {
	m.read()
	return m.SharedDRAManager.DeviceClasses()
}
