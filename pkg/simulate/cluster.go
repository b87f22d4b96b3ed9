// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	configscheme "k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	frameworkplugins "k8s.io/kubernetes/pkg/scheduler/framework/plugins"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultpreemption"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/nodevolumelimits"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"

	shipped "stowage.dev/stowage/manifests/scheduler-config"
	"stowage.dev/stowage/pkg/plugins"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
	"stowage.dev/stowage/pkg/snapshot"
)

// unhurried are limits that leave nothing half done: a simulation holds nobody up, and its context ends it.
var unhurried = deviceclaims.Limits{Holders: time.Hour, Obstacle: time.Hour, WakeUp: time.Hour, Evaluation: time.Hour}

// Options of a simulation. The zero value is the shipped configuration with seed 0.
type Options struct {
	// Configuration is a KubeSchedulerConfiguration as a file has it, whose first profile with DeviceClaims is used. Nil is
	// the shipped one.
	Configuration []byte
	// Seed chooses among nodes of equal score.
	Seed uint64
}

// Cluster is a copy of a cluster on which pods are placed. One goroutine uses it, and closes it.
type Cluster struct {
	cancel   context.CancelFunc
	logger   klog.Logger
	random   *rand.Rand
	factory  informers.SharedInformerFactory
	writes   *writes
	snapshot *internalcache.Snapshot
	profile  framework.Framework
	devices  *draManager
	plugin   *deviceclaims.Plugin
	nominees *nominees
	// empty are the nodes without anybody, by name, as far as they were asked for.
	empty map[string]fwk.NodeInfo
}

// prepare sets up the process: metrics that the framework writes to, and preemption that has ended when its plugin returns.
var prepare = sync.OnceValue(func() error {
	metrics.Register()
	return utilfeature.DefaultMutableFeatureGate.SetFromMap(map[string]bool{
		string(features.SchedulerAsyncPreemption): false, string(features.SchedulerAsyncAPICalls): false,
	})
})

// New returns a cluster with the objects, which must not change afterwards. It switches the feature gates SchedulerAsyncPreemption and
// SchedulerAsyncAPICalls off for the whole process. The error is about the configuration, or ctx has ended.
func New(ctx context.Context, objects *snapshot.Objects, opts Options) (*Cluster, error) {
	if err := prepare(); err != nil {
		return nil, fmt.Errorf("switch to preemption that waits: %w", err)
	}
	config, err := readProfile(opts.Configuration)
	if err != nil {
		return nil, err
	}
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithCancel(ctx)
	c := &Cluster{
		cancel: cancel, logger: logger, random: rand.New(rand.NewPCG(opts.Seed, 0)), nominees: newNominees(objects.Pods),
		empty: map[string]fwk.NodeInfo{},
	}
	if err := c.start(ctx, objects, config); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context, objects *snapshot.Objects, config *schedulerconfig.KubeSchedulerProfile) error {
	client, written, err := newClient(objects)
	if err != nil {
		return err
	}
	c.writes = written
	c.factory = newFactory(client, objects)
	c.snapshot = internalcache.NewEmptySnapshot()
	registry := frameworkplugins.NewInTreeRegistry()
	registry[defaultpreemption.Name] = preemptsInOrder(c.random)
	ours := plugins.NewSet(plugins.WithLimits(unhurried), plugins.WithReading(deviceclaims.Reading{
		Claims: listWatch(client, objects.ResourceClaims), NoTaintRules: len(objects.DeviceTaintRules) == 0,
	})).Registry()
	makePlugin := ours[deviceclaims.Name]
	ours[deviceclaims.Name] = func(ctx context.Context, args runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
		made, err := makePlugin(ctx, args, handle)
		if err == nil {
			c.plugin = made.(*deviceclaims.Plugin)
		}
		return made, err
	}
	if err := registry.Merge(ours); err != nil {
		return err
	}
	if c.devices, err = newDRAManager(ctx, client, objects); err != nil {
		return err
	}
	c.profile, err = frameworkruntime.NewFramework(ctx, registry, config,
		frameworkruntime.WithClientSet(client),
		frameworkruntime.WithInformerFactory(c.factory),
		frameworkruntime.WithSnapshotSharedLister(c.snapshot),
		frameworkruntime.WithMutableSnapshotLister(c.snapshot),
		frameworkruntime.WithEventRecorder(noEvents{}),
		frameworkruntime.WithPodNominator(c.nominees),
		frameworkruntime.WithPodActivator(noQueue{}),
		frameworkruntime.WithWaitingPods(frameworkruntime.NewWaitingPodsMap()),
		frameworkruntime.WithPodsInPreBind(frameworkruntime.NewPodsInPreBindMap()),
		frameworkruntime.WithSharedDRAManager(c.devices),
		frameworkruntime.WithSharedCSIManager(nodevolumelimits.NewCSIManager(c.factory.Storage().V1().CSINodes().Lister())),
		frameworkruntime.WithPodGroupManager(c.snapshot),
		frameworkruntime.WithLogger(c.logger),
	)
	if err != nil {
		return fmt.Errorf("scheduler configuration, profile %s: %w", config.SchedulerName, err)
	}
	if c.plugin == nil {
		return fmt.Errorf("scheduler configuration, profile %s: plugin %s is not enabled", config.SchedulerName, deviceclaims.Name)
	}
	c.factory.Start(ctx.Done())
	if err := c.fill(ctx, objects); err != nil { // while the informers read
		return err
	}
	for kind, synced := range c.factory.WaitForCacheSync(ctx.Done()) {
		if !synced {
			return fmt.Errorf("read %s into the simulation: %w", kind, context.Cause(ctx))
		}
	}
	if err := deviceclaims.WaitForSync(ctx, c.plugin); err != nil {
		return fmt.Errorf("read claims and slices into the simulation: %w", err)
	}
	return nil
}

// fill puts nodes, in the order in which a scheduler's cache has them, and the pods that run on them into the snapshot.
func (c *Cluster) fill(ctx context.Context, objects *snapshot.Objects) error {
	cache := internalcache.New(ctx, nil, utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload),
		utilfeature.DefaultFeatureGate.Enabled(features.CompositePodGroup))
	nodes := sets.New[string]()
	for _, node := range objects.Nodes {
		cache.AddNode(c.logger, node)
		nodes.Insert(node.Name)
	}
	if err := cache.UpdateSnapshot(c.logger, c.snapshot); err != nil {
		return err
	}
	alike := podInfos{}
	for _, pod := range objects.Pods {
		if isOver(pod) || !nodes.Has(pod.Spec.NodeName) {
			continue
		}
		if err := c.snapshot.AssumePod(alike.of(pod)); err != nil {
			return fmt.Errorf("pod %s: %w", snapshot.Reference(pod), err)
		}
	}
	return nil
}

// isOver tells whether a pod needs nothing of its node any more.
func isOver(pod *v1.Pod) bool {
	return pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed
}

// Close ends what runs in the background.
func (c *Cluster) Close() {
	c.cancel()
	if c.profile != nil {
		_ = c.profile.Close() // the plugins' errors are about what they would have told the cluster
	}
	if c.factory != nil {
		c.factory.Shutdown()
	}
	if c.devices != nil {
		c.devices.factory.Shutdown()
	}
}

// readProfile decodes a configuration, with defaults, and returns its first profile that does not leave DeviceClaims out.
func readProfile(file []byte) (*schedulerconfig.KubeSchedulerProfile, error) {
	if file == nil {
		file = shipped.SecondScheduler
	}
	object, _, err := configscheme.Codecs.UniversalDecoder().Decode(file, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("scheduler configuration: %w", err)
	}
	config, ok := object.(*schedulerconfig.KubeSchedulerConfiguration)
	if !ok {
		return nil, fmt.Errorf("scheduler configuration: it is a %T, want a KubeSchedulerConfiguration", object)
	}
	for i := range config.Profiles {
		profile := &config.Profiles[i]
		if profile.Plugins == nil {
			continue
		}
		for _, plugin := range profile.Plugins.MultiPoint.Enabled {
			if plugin.Name == deviceclaims.Name {
				return profile, nil
			}
		}
	}
	return nil, errors.New("scheduler configuration: no profile enables DeviceClaims in multiPoint")
}

// noEvents drops events.
type noEvents struct{}

func (noEvents) Eventf(runtime.Object, runtime.Object, string, string, string, string, ...any) {}

func (r noEvents) WithLogger(logr.Logger) events.EventRecorderLogger { return r }

// noQueue has nobody waiting who could be told to try again.
type noQueue struct{}

func (noQueue) Activate(klog.Logger, map[string]*v1.Pod) {}
