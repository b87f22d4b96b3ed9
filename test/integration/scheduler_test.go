// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/transport"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	kubescheduler "k8s.io/kubernetes/pkg/scheduler"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/profile"

	"stowage.dev/stowage/pkg/plugins"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
)

// unhurried are limits that a slow machine does not reach either, so that pods are told the same on each.
var unhurried = deviceclaims.Limits{Holders: 30 * time.Second, Obstacle: 30 * time.Second, WakeUp: 30 * time.Second}

// scheduler is a scheduler in this process, set up as cmd/scheduler sets up its own.
type scheduler struct {
	name     string // of its only, or its last profile
	profiles profile.Map
	probe    *probe
	log      *lockedBuffer
}

// wantNoErrors fails if there is an error in the scheduler's log.
func (s *scheduler) wantNoErrors(t *testing.T) {
	t.Helper()
	s.log.mutex.Lock()
	defer s.log.mutex.Unlock()
	for line := range strings.Lines(s.log.buffer.String()) {
		if errorLine.MatchString(line) && !strings.Contains(line, upstreamsCache) && !strings.Contains(line, upstreamsQueue) {
			t.Errorf("in the log of scheduler %s: %s", s.name, line)
		}
	}
}

// errorLine is what a line of klog begins with that tells of an error.
var errorLine = regexp.MustCompile(`^E\d{4} `)

// upstreamsCache is in the line with which kube-scheduler's cache says that it counted the volumes of nodes anew. The pods of other tests
// make it do so.
const upstreamsCache = "rebuilding node snapshot due to unexpected error from refreshing PVC ref counts"

// upstreamsQueue is in the line with which kube-scheduler says that a pod whose binding failed was updated before the failure was noted.
// The pod is tried. It is a race in kube-scheduler: TestUpstreamsQueueAddsAPodWhoseBindingFails in pkg/plugins says how it comes about.
const upstreamsQueue = "is already present in"

// schedulerSetup says what is unusual about a scheduler in this process.
type schedulerSetup struct {
	config string                // file; secondScheduler if empty
	probe  *probe                // a plugin of the test's beside ours
	wrap   transport.WrapperFunc // between the scheduler's clients and the API server
	edit   func(*schedulerconfig.KubeSchedulerConfiguration)
	// meter, if set, measures what our plugin takes. Then its limits are those that are shipped, and the log has no decisions.
	meter *meter
	// identity connects to the API server; schedulerIdentity in the shared cluster if nil.
	identity *rest.Config
}

// startScheduler runs a scheduler until the test ends. The last profile of the configuration gets the given name
// in place of "stowage"; all else is as the file says.
func startScheduler(t *testing.T, name string, setup schedulerSetup) *scheduler {
	t.Helper()
	asShipped := setup.isAsShipped()
	if setup.config == "" {
		setup.config = secondScheduler
	}
	if setup.probe == nil {
		setup.probe = &probe{}
	}
	log := &lockedBuffer{}
	limits, verbosity := unhurried, 4
	if setup.meter != nil {
		limits, verbosity = setup.meter.limits, 0
	}
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log), textlogger.Verbosity(verbosity)))
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logger))

	config, err := options.LoadConfigFromFile(logger, setup.config)
	if err != nil {
		t.Fatalf("loading %s: %v", setup.config, err)
	}
	config.Profiles[len(config.Profiles)-1].SchedulerName = name
	if setup.edit != nil {
		setup.edit(config)
	}
	for i := range config.Profiles {
		setup.probe.enableIn(&config.Profiles[i])
	}
	set := plugins.NewSet(plugins.WithLimits(limits))
	registry := set.Registry()
	if err := registry.Register(probeName, setup.probe.factory); err != nil {
		t.Fatal(err)
	}
	if setup.identity == nil {
		if setup.identity, err = schedulerIdentity(); err != nil {
			t.Fatalf("getting the scheduler's identity: %v", err)
		}
	}
	identity := rest.CopyConfig(setup.identity)
	identity.UserAgent = name // what it asks for is recorded
	identity.QPS, identity.Burst = config.ClientConnection.QPS, int(config.ClientConnection.Burst)
	if setup.wrap != nil {
		identity.Wrap(setup.wrap)
	}
	client := kubernetes.Interface(kubernetes.NewForConfigOrDie(identity))
	factory := kubescheduler.NewInformerFactory(client, 0, nil)
	if setup.meter != nil {
		client, factory = setup.meter.client(client), setup.meter.factory(factory)
		registry[deviceclaims.Name] = setup.meter.plugin(registry[deviceclaims.Name])
	}
	dynamicInformers := dynamicinformer.NewDynamicSharedInformerFactory(dynamic.NewForConfigOrDie(identity), 0)
	broadcaster := events.NewEventBroadcasterAdapterWithContext(ctx, client)

	s, err := newScheduler(ctx, client, factory, dynamicInformers,
		func(name string) events.EventRecorderLogger { return broadcaster.NewRecorder(name) },
		kubescheduler.WithComponentConfigVersion(config.TypeMeta.APIVersion),
		kubescheduler.WithKubeConfig(identity),
		kubescheduler.WithProfiles(config.Profiles...),
		kubescheduler.WithParallelism(config.Parallelism),
		kubescheduler.WithPodInitialBackoffSeconds(config.PodInitialBackoffSeconds),
		kubescheduler.WithPodMaxBackoffSeconds(config.PodMaxBackoffSeconds),
		kubescheduler.WithFrameworkOutOfTreeRegistry(registry),
	)
	if err != nil {
		cancel()
		t.Fatalf("making a scheduler from %s: %v", setup.config, err)
	}

	if err := set.Adopt(s); err != nil {
		t.Errorf("the configuration %s: %v", setup.config, err)
	}

	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
		factory.Shutdown()
		dynamicInformers.Shutdown()
		broadcaster.Shutdown()
		if log.tail(1, "is forbidden") != "" {
			t.Errorf("scheduler %s was refused by the API server:\n%s", name, log.tail(10, "is forbidden"))
		}
		if t.Failed() {
			t.Logf("end of the log of scheduler %s:\n%s", name, log.tail(200, name))
		}
	})
	broadcaster.StartRecordingToSink(ctx.Done())
	factory.Start(ctx.Done())
	dynamicInformers.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	dynamicInformers.WaitForCacheSync(ctx.Done())
	if err := s.WaitForHandlersSync(ctx); err != nil {
		t.Fatalf("waiting for the caches of scheduler %s: %v", name, err)
	}
	running.Go(func() { s.Run(ctx) })
	if asShipped {
		shippedSchedulers.Store(name, setup.config)
		t.Cleanup(func() { shippedSchedulers.Delete(name) })
	}
	return &scheduler{name: name, profiles: s.Profiles, probe: setup.probe, log: log}
}

var making sync.Mutex // kube-scheduler sets package variables when it makes a scheduler

func newScheduler(ctx context.Context, client kubernetes.Interface, f informers.SharedInformerFactory, d dynamicinformer.DynamicSharedInformerFactory,
	r profile.RecorderFactory, opts ...kubescheduler.Option,
) (*kubescheduler.Scheduler, error) {
	making.Lock()
	defer making.Unlock()
	return kubescheduler.New(ctx, client, f, d, r, opts...)
}

// lockedBuffer is a log.
type lockedBuffer struct {
	mutex  sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.buffer.Write(p)
}

// tail returns the last n lines that have the given word.
func (b *lockedBuffer) tail(n int, word string) string {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	var lines []string
	for line := range strings.Lines(b.buffer.String()) {
		if strings.Contains(line, word) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-n):], "")
}
