// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/component-base/version"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	stowageversion "stowage.dev/stowage/internal/version"
	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/exporter"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/kmod"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/stepaside"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/policies"
)

// runAgent serves this node's kubelet until ctx ends.
func runAgent(ctx context.Context, opts *options) error {
	if err := opts.validateRun(); err != nil {
		return err
	}
	config, err := newConfig(opts.kubeconfig)
	if err != nil {
		return err
	}
	api, err := newClients(config, opts.nodeName)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting", "version", version.Get().GitVersion, "stowage", stowageversion.Release(),
		"node", opts.nodeName, "nvml", opts.nvml)
	opts.keepSimulation()
	keeper := newKeeper(opts, api)
	agent, gpus, err := newAgent(ctx, opts, api, keeper)
	if err != nil {
		return err
	}
	stopServing, err := serveHealth(ctx, opts, config, agent.Status(), gpus)
	if err != nil {
		return err
	}
	defer stopServing()
	if gpus != nil {
		counting, stop := context.WithCancel(ctx)
		var group sync.WaitGroup
		defer group.Wait()
		defer stop()
		group.Go(func() { gpus.Run(counting) })
	}
	stopControl, err := serveSimulation(ctx, opts)
	if err != nil {
		return err
	}
	defer stopControl()
	// Before the driver is opened for the first time: somebody may want it for himself.
	keeper.Start(ctx)
	ctx, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	var anew error
	group.Go(func() {
		if anew = keeper.Run(ctx, agent); anew != nil {
			stop()
		}
	})
	err = runUnderPolicies(ctx, api.agent, opts.nodeName, agent.Run)
	stop()
	group.Wait()
	return errors.Join(err, anew)
}

// runUnderPolicies runs the agent once the API server refuses what the policies forbid. Where the API server does not answer the kubelet is
// served all the same, until it is known that a policy is void.
func runUnderPolicies(ctx context.Context, client kubernetes.Interface, node string, run func(context.Context) error) error {
	ctx, fail := context.WithCancelCause(ctx)
	undecided, decided := make(chan struct{}), make(chan error, 1)
	var group sync.WaitGroup
	defer group.Wait()
	defer fail(nil)
	group.Go(func() {
		err := policies.Await(ctx, client, policies.OfNodeAgent(node), sync.OnceFunc(func() { close(undecided) }))
		if err != nil {
			fail(err)
		}
		decided <- err
	})
	select {
	case err := <-decided:
		if err != nil {
			return err
		}
	case <-undecided:
	}
	err := run(ctx)
	if void := (*policies.VoidError)(nil); errors.As(context.Cause(ctx), &void) {
		return void
	}
	return err
}

// newAgent puts the agent together as the flags say; nothing of it runs. The metrics of its GPUs are nil if there are to be none.
func newAgent(ctx context.Context, opts *options, api clients, keeper *stepaside.Keeper) (*driver.Agent, *exporter.Exporter, error) {
	shares, err := opts.shares()
	if err != nil {
		return nil, nil, err
	}
	sharingRules, err := opts.sharing()
	if err != nil {
		return nil, nil, err
	}
	opts.keepSimulation()
	bus, err := newBus(opts)
	if err != nil {
		return nil, nil, err
	}
	rules, err := health.ParsePolicy(opts.healthRules)
	if err != nil {
		return nil, nil, err
	}
	happened := &events{}
	hardware := driver.NewHardware(driver.HardwareOptions{
		Open:     opts.open,
		Clock:    clock.RealClock{},
		Keeper:   keeper,
		StateDir: opts.stateDir,
		Rules:    rules,
		Held:     driver.HeldInLedger(opts.stateDir),
		Users:    bus.users,
		Event:    happened.happened,
	})
	gpus := newExporter(opts, hardware)
	happened.exporter = gpus
	handle, err := opts.open()
	if err != nil {
		return nil, nil, err
	}
	sharingRules = opts.onHost(ctx, sharingRules, handle.Simulated)
	var hook *cdi.Hook
	if !handle.Simulated {
		if hook, err = opts.installedHook(); err != nil {
			return nil, nil, err
		}
	}
	backend, tools, err := newBackend(ctx, opts, hardware, hook)
	if err != nil {
		return nil, nil, err
	}
	advertised, err := opts.advertised()
	if err != nil {
		return nil, nil, err
	}
	agent, err := driver.New(driver.Options{
		NodeName:    opts.nodeName,
		PodUID:      types.UID(opts.podUID),
		Version:     version.Get().GitVersion,
		Client:      api.agent,
		NodeClient:  api.node,
		KubeletRoot: opts.kubeletRoot,
		Kubelet:     driver.Kubelet{Socket: opts.socket},
		StateDir:    opts.stateDir,
		CDIDir:      opts.cdiRoot,
		HostRoot:    opts.host.root,
		Backend:     backend,
		Hardware:    hardware,
		Tools:       tools,

		Leftovers:         prepare.Leftovers(opts.leftovers),
		HostProcesses:     driver.HostProcesses(opts.hostProcesses),
		LockTimeout:       opts.lockTimeout,
		DynamicPartitions: opts.partitions == partitionsDynamic,
		Shares:            shares,
		Sharing:           sharingRules,
		Passthrough:       opts.passthrough,
		Warning:           opts.hostWarning(ctx, hook),
		PCI:               bus.pci,
		Users:             bus.users,
	})
	if err != nil {
		return nil, nil, err
	}
	agent.Advertise(advertised)
	return agent, gpus, nil
}

// serveSimulation takes commands to simulated GPUs until stop is called. The agent goes on without.
func serveSimulation(ctx context.Context, opts *options) (stop func(), err error) {
	handle, err := opts.open()
	if err != nil || handle.Machine == nil {
		return func() {}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := handle.Machine.ServeControl(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Simulated GPUs take no commands", "folder", opts.simDir)
		}
	}()
	return func() {
		cancel()
		<-done
	}, nil
}

// newConfig reads the kubeconfig, or the ServiceAccount of the pod.
func newConfig(kubeconfig string) (*rest.Config, error) {
	var (
		config *rest.Config
		err    error
	)
	if kubeconfig == "" {
		if config, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("no --kubeconfig is given, and there is no pod's ServiceAccount: %w", err)
		}
	} else if config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		return nil, fmt.Errorf("--kubeconfig %s: %w", kubeconfig, err)
	}
	config.UserAgent = rest.DefaultKubernetesUserAgent()
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	// A burst of pods on the node means a claim to read for each, while the kubelet waits.
	config.QPS, config.Burst = 50, 200
	return config, nil
}

// clients of the API server: as the agent, and as its node, for what only the node authorizer can limit to one node.
type clients struct{ agent, node kubernetes.Interface }

func newClientsOf(kubeconfig, nodeName string) (clients, error) {
	config, err := newConfig(kubeconfig)
	if err != nil {
		return clients{}, err
	}
	return newClients(config, nodeName)
}

func newClients(config *rest.Config, nodeName string) (clients, error) {
	agent, err := newClient(config)
	if err != nil {
		return clients{}, err
	}
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + nodeName}
	node, err := newClient(config)
	return clients{agent: agent, node: node}, err
}

func newClient(config *rest.Config) (kubernetes.Interface, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	return client, nil
}

// bus is how GPUs leave the NVIDIA driver, and come back to it. It is needed without --passthrough, too: claims of before end.
type bus struct {
	pci   *vfio.Binder
	users vfio.Users
}

func newBus(opts *options) (bus, error) {
	handle, err := opts.open()
	if err != nil {
		return bus{}, err
	}
	b := bus{pci: vfio.NewBinder(handle.Sysfs), users: vfio.Proc{Root: "/proc"}}
	if handle.Machine != nil {
		b.users = vfio.Simulated{Machine: handle.Machine}
	}
	return b, nil
}

// newBackend decides what containers get, and how GPUs are acted on. The library is opened here once, to refuse
// flags that cannot work at once; whether a driver is loaded shows later. The hook is nil for one of the host's.
func newBackend(ctx context.Context, opts *options, hardware *driver.Hardware, hook *cdi.Hook) (cdi.Backend, sharing.Tools, error) {
	handle, err := opts.open()
	if err != nil {
		return nil, sharing.Tools{}, err
	}
	daemons, err := opts.daemons()
	if err != nil {
		return nil, sharing.Tools{}, err
	}
	if handle.Simulated {
		backend, err := cdi.NewSimulated(ctx, cdi.SimulatedOptions{DevRoot: opts.devRoot, ProcRoot: "/proc"})
		if opts.simMPSFolders {
			return backend, sharing.NewSimulatedWithFolders(handle.Machine, daemons), err
		}
		return backend, sharing.NewSimulated(handle.Machine), err
	}
	driverOpts := cdi.DriverOptions{
		NVML:           hardware.NVML,
		DriverRoot:     opts.driverRoot,
		HostDriverRoot: opts.hostDriverRoot,
		HookPath:       opts.hook.path,
		ProcRoot:       "/proc",
		LoadModule:     opts.loadModule(),
		MakeNode:       cdi.MakeNode,
	}
	if hook != nil {
		// Where it cannot be installed the agent serves all the same, and says that it is not ready.
		driverOpts.InstallHook = hook.Install
	}
	backend := cdi.NewDriver(driverOpts)
	return backend, sharing.NewDriver(daemons), nil
}

// installedHook is the program that the agent brings along; nil if it is one of the host's.
func (o *options) installedHook() (*cdi.Hook, error) {
	if o.hook.path != "" || o.hook.from == "" {
		return nil, nil
	}
	hook, err := cdi.NewHook(o.hook.from, o.stateDir, filepath.Join(o.kubeletRoot, "plugins", driver.Name), o.host.root)
	if err != nil {
		return nil, fmt.Errorf("--nvidia-cdi-hook-from: %w", err)
	}
	return hook, nil
}

// loadModule loads a module of the kernel that is the host's or, with the driver in a container, that container's.
func (o *options) loadModule() func(ctx context.Context, module string) error {
	loaders := []*kmod.Loader{kmod.New(o.host.root)}
	if o.driverRoot != o.host.root {
		loaders = append(loaders, kmod.New(o.driverRoot))
	}
	return func(ctx context.Context, module string) error {
		var failed error
		for _, loader := range loaders {
			err := loader.Load(ctx, module)
			if err == nil {
				return nil
			}
			failed = errors.Join(failed, err)
		}
		return failed
	}
}

// daemons are the flags for daemons of the Multi-Process Service.
func (o *options) daemons() (sharing.DriverOptions, error) {
	shm, err := o.mpsShm()
	return sharing.DriverOptions{
		DriverRoot:     o.driverRoot,
		HostDriverRoot: o.hostDriverRoot,
		MPSRoot:        o.mpsRoot,
		ShmBytes:       shm,
		Unconfined:     !o.mpsSandbox,
		HostRoot:       o.host.root,
		ProcRoot:       "/proc",
	}, err
}
