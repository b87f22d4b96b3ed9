package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/cli/globalflag"
	basecompatibility "k8s.io/component-base/compatibility"
	"k8s.io/component-base/featuregate"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/component-base/term"
	"k8s.io/component-base/version/verflag"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"

	"stowage.dev/stowage/pkg/plugins"
)

// newCommand returns kube-scheduler's command with the plugins. It is put together from the same parts as
// kube-scheduler's own, whose constructor leaves no room to look at the profiles before they run.
func newCommand() *cobra.Command {
	opts := options.NewOptions()
	cmd := &cobra.Command{
		Use:   "scheduler",
		Short: "kube-scheduler that chooses exact devices for pods with resource claims",
		Args:  cobra.NoArgs,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return opts.ComponentGlobalsRegistry.Set() // feature gates
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			verflag.PrintAndExitIfRequested()
			return run(genericapiserver.SetupSignalContext(), cmd, opts)
		},
	}
	sets := opts.Flags
	verflag.AddFlags(sets.FlagSet("global"))
	globalflag.AddGlobalFlags(sets.FlagSet("global"), cmd.Name(), logs.SkipLoggingConfigurationFlags())
	for _, set := range sets.FlagSets {
		cmd.Flags().AddFlagSet(set)
	}
	cols, _, _ := term.TerminalSize(cmd.OutOrStdout())
	cliflag.SetUsageAndHelpFunc(cmd, *sets, cols)
	return cmd
}

// run sets the scheduler up, refuses configurations that the plugins cannot work with, and schedules until ctx
// ends.
func run(ctx context.Context, cmd *cobra.Command, opts *options.Options) error {
	gates := opts.ComponentGlobalsRegistry.FeatureGateFor(basecompatibility.DefaultKubeComponent)
	if err := logsapi.ValidateAndApply(opts.Logs, gates); err != nil {
		return fmt.Errorf("logging flags: %w", err)
	}
	cliflag.PrintFlags(cmd.Flags())
	if err := checkKubeconfig(opts); err != nil {
		return err
	}
	if opts.InformerName == nil {
		name, err := cache.NewInformerName("kube-scheduler")
		if err != nil {
			return fmt.Errorf("name the informers: %w", err)
		}
		opts.InformerName = name
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var registered []app.Option
	set := plugins.NewSet()
	for name, factory := range set.Registry() {
		registered = append(registered, app.WithPlugin(name, factory))
	}
	config, scheduler, err := app.Setup(ctx, opts, registered...)
	if err != nil {
		return fmt.Errorf("set up the scheduler: %w", err)
	}
	if err := set.Adopt(scheduler); err != nil {
		return err
	}
	if mutable, ok := gates.(featuregate.MutableFeatureGate); ok {
		mutable.AddMetrics()
	}
	opts.ComponentGlobalsRegistry.AddMetrics()
	return app.Run(ctx, config, scheduler)
}

// checkKubeconfig fails if the kubeconfig cannot be read, naming it and who asked for it. What is wrong with the
// configuration file itself is reported by Setup.
func checkKubeconfig(opts *options.Options) error {
	file, from := opts.Deprecated.Kubeconfig, "--kubeconfig"
	if opts.ConfigFile != "" {
		config, err := options.LoadConfigFromFile(klog.Background(), opts.ConfigFile)
		if err != nil {
			return fmt.Errorf("--config %s: %w", opts.ConfigFile, err)
		}
		file, from = config.ClientConnection.Kubeconfig, "--config "+opts.ConfigFile+", clientConnection.kubeconfig"
	}
	if file == "" {
		return nil // in a pod: its ServiceAccount
	}
	if _, err := clientcmd.LoadFromFile(file); err != nil {
		return fmt.Errorf("%s: read kubeconfig %q: %w", from, file, err)
	}
	return nil
}
