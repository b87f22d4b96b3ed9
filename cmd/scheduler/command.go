// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
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
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/term"
	"k8s.io/component-base/version/verflag"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"

	"stowage.dev/stowage/internal/version"
	"stowage.dev/stowage/pkg/plugins"
)

// newCommand returns kube-scheduler's command with the plugins. It is put together from the same parts as
// kube-scheduler's own, whose constructor leaves no room to look at the profiles before they run.
func newCommand() *cobra.Command {
	opts := options.NewOptions()
	var validate string
	cmd := &cobra.Command{
		Use:   "scheduler",
		Short: "kube-scheduler that chooses exact devices for pods with resource claims",
		Long: "kube-scheduler that chooses exact devices for pods with resource claims. It takes kube-scheduler's flags and\n" +
			"configuration file, in which the plugin DeviceClaims has arguments of its own: see the end of this text.",
		Args: cobra.NoArgs,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return opts.ComponentGlobalsRegistry.Set() // feature gates
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if printVersion(cmd) {
				return nil
			}
			verflag.PrintAndExitIfRequested() // --version=raw
			if cmd.Flags().Changed(validateConfigFlag) {
				if err := applyLogs(opts); err != nil {
					return err
				}
				return validateConfig(cmd.Context(), cmd.OutOrStdout(), opts, validate)
			}
			return run(genericapiserver.SetupSignalContext(), cmd, opts)
		},
	}
	sets := opts.Flags
	sets.FlagSet("misc").StringVar(&validate, validateConfigFlag, "",
		"Check this configuration file as the start would, print all that is refused or warned of, and exit: with 0 if a "+
			"scheduler starts with it, with 1 if not. Needs no cluster. Flags such as --feature-gates count.")
	verflag.AddFlags(sets.FlagSet("global"))
	globalflag.AddGlobalFlags(sets.FlagSet("global"), cmd.Name(), logs.SkipLoggingConfigurationFlags())
	for _, set := range sets.FlagSets {
		cmd.Flags().AddFlagSet(set)
	}
	cols, _, _ := term.TerminalSize(cmd.OutOrStdout())
	cliflag.SetUsageAndHelpFunc(cmd, *sets, cols)
	explainArgs(cmd)
	return cmd
}

// printVersion does what --version asks for, and tells whether it did: kube-scheduler's line, and ours below it.
func printVersion(cmd *cobra.Command) bool {
	if cmd.Flags().Lookup("version").Value.String() != "true" {
		return false
	}
	fmt.Fprintln(cmd.OutOrStdout(), "Kubernetes", version.Beside())
	return true
}

const validateConfigFlag = "validate-config"

// run sets the scheduler up, refuses configurations that the plugins cannot work with, and schedules until ctx
// ends.
func run(ctx context.Context, cmd *cobra.Command, opts *options.Options) error {
	if err := applyLogs(opts); err != nil {
		return err
	}
	cliflag.PrintFlags(cmd.Flags())
	if err := checkKubeconfig(opts); err != nil {
		return explained(ctx, opts, err)
	}
	if err := applyMetrics(opts); err != nil {
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
	denied := noteDenials()
	config, scheduler, err := app.Setup(ctx, opts, registered...)
	if err != nil {
		return explained(ctx, opts, fmt.Errorf("set up the scheduler: %w", err))
	}
	if err := set.Adopt(scheduler); err != nil {
		return explained(ctx, opts, err)
	}
	for _, finding := range plugins.Check(scheduler.Profiles) {
		klog.FromContext(ctx).Info("Scheduler configuration: warning", "profile", finding.Profile, "plugin", finding.Plugin,
			"field", finding.Field, "value", finding.Value, "problem", finding.Problem, "change", finding.Change)
	}
	if mutable, ok := gatesOf(opts).(featuregate.MutableFeatureGate); ok {
		mutable.AddMetrics()
	}
	opts.ComponentGlobalsRegistry.AddMetrics()
	if err := checkRights(ctx, config, scheduler, denied); err != nil {
		return err
	}
	return app.Run(ctx, config, scheduler)
}

func gatesOf(opts *options.Options) featuregate.FeatureGate {
	return opts.ComponentGlobalsRegistry.FeatureGateFor(basecompatibility.DefaultKubeComponent)
}

func applyLogs(opts *options.Options) error {
	if err := logsapi.ValidateAndApply(opts.Logs, gatesOf(opts)); err != nil {
		return fmt.Errorf("logging flags: %w", err)
	}
	return nil
}

// applyMetrics does what Setup does with the flags about metrics if no allow-list is among them. Setup would log its
// absence as an error.
func applyMetrics(opts *options.Options) error {
	flags := opts.Metrics
	if len(flags.AllowListMapping) > 0 || flags.AllowListMappingManifest != "" {
		return nil
	}
	if err := errors.Join(flags.Validate()...); err != nil {
		return err
	}
	if flags.ShowHiddenMetricsForVersion != "" {
		metrics.SetShowHidden()
	}
	metrics.SetDisabledMetrics(flags.DisabledMetrics)
	opts.Metrics = nil
	return nil
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
		return &kubeconfigError{from, file, err}
	}
	return nil
}

// kubeconfigError says that a kubeconfig cannot be read.
type kubeconfigError struct {
	from, file string // who asked for it, and where it should be
	err        error
}

func (e *kubeconfigError) Error() string {
	return fmt.Sprintf("%s: read kubeconfig %q: %v", e.from, e.file, e.err)
}

func (e *kubeconfigError) Unwrap() error { return e.err }
