// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	"k8s.io/kubernetes/pkg/features"
	kubescheduler "k8s.io/kubernetes/pkg/scheduler"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	internalcache "k8s.io/kubernetes/pkg/scheduler/backend/cache"
	internalqueue "k8s.io/kubernetes/pkg/scheduler/backend/queue"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
	"stowage.dev/stowage/test/liveness/memoryapi"
)

// configFile is the shipped configuration.
const configFile = "../../manifests/scheduler-config/second-scheduler.yaml"

// schedulerName is the shipped configuration's.
const schedulerName = "stowage"

// loadConfig reads the shipped configuration, with groups and without: the default plugins depend on that.
var loadConfig = map[bool]func() (*schedulerconfig.KubeSchedulerConfiguration, error){
	false: sync.OnceValues(readConfig),
	true:  sync.OnceValues(readConfig),
}

func readConfig() (*schedulerconfig.KubeSchedulerConfiguration, error) {
	return options.LoadConfigFromFile(klog.Background(), configFile)
}

// switchGroups switches groups of pods on or off, for the whole process.
func switchGroups(on bool) error {
	return utilfeature.DefaultMutableFeatureGate.SetFromMap(map[string]bool{
		string(features.GenericWorkload): on, string(features.DRAWorkloadResourceClaims): on,
	})
}

// noFlush is longer than any history: a pod that only the flush of old unschedulable pods wakes sleeps.
const noFlush = 1000 * time.Hour

// scheduler is a scheduler in a bubble, set up as cmd/scheduler sets up its own.
type scheduler struct {
	name    string // its client's
	cancel  context.CancelFunc
	running sync.WaitGroup
	synced  chan struct{} // closed when it knows what there is
	// attempts are how often it has tried a pod or a group.
	attempts atomic.Int64
	queue    interface {
		NominatedPodsForNode(node string) []fwk.PodInfo
	}
}

// arguments changes those of the plugin that a scenario has otherwise than the shipped configuration.
func (s Scenario) arguments(args *config.DeviceClaimsArgs) {
	args.Fence.Enabled = ptr.To(!s.NoFence)
	if s.BindingTimeout > 0 {
		args.BindingTimeout = &metav1.Duration{Duration: s.BindingTimeout}
	}
}

// startScheduler starts a scheduler on an API and does not wait for it. tried is called at each scheduling attempt.
func startScheduler(
	ctx context.Context, name string, api *memoryapi.Server, scenario Scenario, tried func(group bool),
) (*scheduler, error) {
	loaded, err := loadConfig[utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload)]()
	if err != nil {
		return nil, err
	}
	cfg := loaded.DeepCopy()
	for i := range cfg.Profiles[0].PluginConfig {
		if args, ok := cfg.Profiles[0].PluginConfig[i].Args.(*config.DeviceClaimsArgs); ok {
			scenario.arguments(args)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	client := api.Client(name)
	factory := kubescheduler.NewInformerFactory(client, 0, nil)
	dynamicInformers := dynamicinformer.NewDynamicSharedInformerFactory(dynamic.NewForConfigOrDie(api.Config(name)), 0)
	set := plugins.NewSet(plugins.WithLimits(unhurried))
	sched, err := kubescheduler.New(ctx, client, factory, dynamicInformers,
		func(string) events.EventRecorderLogger { return silentRecorder{} },
		kubescheduler.WithComponentConfigVersion(cfg.TypeMeta.APIVersion),
		kubescheduler.WithProfiles(cfg.Profiles...),
		kubescheduler.WithParallelism(1),
		kubescheduler.WithPodInitialBackoffSeconds(cfg.PodInitialBackoffSeconds),
		kubescheduler.WithPodMaxBackoffSeconds(cfg.PodMaxBackoffSeconds),
		kubescheduler.WithPodMaxInUnschedulablePodsDuration(noFlush),
		kubescheduler.WithFrameworkOutOfTreeRegistry(set.Registry()),
	)
	if err == nil {
		err = set.Adopt(sched)
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("make scheduler %s: %w", name, err)
	}
	if scenario.LateQueue > 0 {
		sched.SchedulingQueue = lateQueue{sched.SchedulingQueue, scenario.LateQueue}
	}
	if scenario.LateCache > 0 {
		sched.Cache = lateCache{sched.Cache, scenario.LateCache}
	}
	s := &scheduler{name: name, cancel: cancel, synced: make(chan struct{}), queue: sched.SchedulingQueue}
	next := sched.NextEntity
	sched.NextEntity = func(logger klog.Logger) (framework.QueuedEntityInfo, error) {
		entity, err := next(logger)
		s.attempts.Add(1)
		tried(err == nil && entity != nil && entity.Type() == fwk.PodGroupKeyType)
		return entity, err
	}
	s.running.Go(func() {
		defer factory.Shutdown()
		defer dynamicInformers.Shutdown()
		factory.Start(ctx.Done())
		dynamicInformers.Start(ctx.Done())
		factory.WaitForCacheSync(ctx.Done())
		dynamicInformers.WaitForCacheSync(ctx.Done())
		if err := sched.WaitForHandlersSync(ctx); err != nil {
			panic(err) // nobody stops it before
		}
		close(s.synced)
		sched.Run(ctx)
	})
	return s, nil
}

// lateQueue hears of nominations later than all others. A real one does so when its listener's turn comes late.
type lateQueue struct {
	internalqueue.SchedulingQueue
	by time.Duration
}

func (q lateQueue) Update(ctx context.Context, before, after *v1.Pod) {
	if before.Status.NominatedNodeName != after.Status.NominatedNodeName {
		time.Sleep(q.by)
	}
	q.SchedulingQueue.Update(ctx, before, after)
}

// lateCache hears later than all others that a pod is gone, for the same reason.
type lateCache struct {
	internalcache.Cache
	by time.Duration
}

func (c lateCache) RemovePod(logger klog.Logger, pod *v1.Pod) error {
	time.Sleep(c.by)
	return c.Cache.RemovePod(logger, pod)
}

// stop ends the scheduler as a signal would, but not before it knows what there is: client-go leaves watches behind whose
// informers end while they are listing.
func (s *scheduler) stop() {
	<-s.synced
	synctest.Wait() // the claim tracker has a list of its own
	s.cancel()
	s.running.Wait()
}

// unhurried are limits that a slow machine does not reach either. Time does not pass in a bubble while somebody works, so it is
// only for what waits.
var unhurried = deviceclaims.Limits{Holders: 30 * time.Second, Obstacle: 30 * time.Second, WakeUp: 30 * time.Second}

// silentRecorder drops events.
type silentRecorder struct{}

func (silentRecorder) Eventf(runtime.Object, runtime.Object, string, string, string, string, ...any) {
}

func (r silentRecorder) WithLogger(logr.Logger) events.EventRecorderLogger { return r }

// prepareProcess starts what lives as long as the process, so that no bubble does: the runtime's goroutine for signals,
// which kube-scheduler asks for. And it takes away the pause after each error that is logged, because the last error may
// have been in another bubble, which is another time.
var prepareProcess = sync.OnceFunc(func() {
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1]
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR2)
	signal.Stop(signals)
})
