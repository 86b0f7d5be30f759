<?php
// Loads classes where composer.json has them, or below src/ and lib/ by their names.
$root = getcwd();
$known = json_decode((string) @file_get_contents("$root/composer.json"), true) ?: [];
$prefixes = [];
$classes = [];
$files = [];
$tests = array_filter(['test', 'tests', 'Tests'], 'is_dir');
foreach (['autoload', 'autoload-dev'] as $part) {
    foreach (['psr-4', 'psr-0'] as $kind) {
        foreach ($known[$part][$kind] ?? [] as $prefix => $folders) {
            foreach ((array) $folders as $folder) {
                $prefixes[] = [$kind, $prefix, rtrim("$root/$folder", '/')];
            }
        }
    }
    foreach (array_merge($known[$part]['classmap'] ?? [], $tests) as $place) {
        $found = is_file("$root/$place") ? [new SplFileInfo("$root/$place")]
            : new RecursiveIteratorIterator(new RecursiveDirectoryIterator("$root/$place"));
        foreach ($found as $file) {
            $text = $file->getExtension() === 'php' ? file_get_contents($file) : '';
            $space = preg_match('/^\s*namespace\s+([\w\\\\]+)/m', $text, $m) ? "$m[1]\\" : '';
            $pattern = '/^\s*(?:(?:abstract|final)\s+)*(?:class|interface|trait)\s+(\w+)/m';
            preg_match_all($pattern, $text, $names);
            foreach ($names[1] as $name) {
                $classes[$space . $name] = (string) $file;
            }
        }
    }
    $files = array_merge($files, $known[$part]['files'] ?? []);
}
if (!$prefixes && !$classes) {
    $prefixes = [['psr-0', '', "$root/src"], ['psr-0', '', "$root/lib"]];
    $prefixes[] = ['psr-0', '', $root];
}
set_include_path("$root/src:$root/lib:$root:" . get_include_path());
spl_autoload_register(static function ($class) use ($prefixes, $classes) {
    $paths = isset($classes[$class]) ? [$classes[$class]] : [];
    foreach ($prefixes as [$kind, $prefix, $folder]) {
        if ($prefix === '' || strncmp($class, $prefix, strlen($prefix)) === 0) {
            $rest = $kind === 'psr-4' ? substr($class, strlen($prefix)) : $class;
            $cut = strrpos($rest, '\\');
            $cut = $cut === false ? 0 : $cut + 1;
            $name = substr($rest, $cut);
            $name = $kind === 'psr-0' ? strtr($name, '_', '/') : $name;
            $paths[] = "$folder/" . strtr(substr($rest, 0, $cut), '\\', '/') . "$name.php";
        }
    }
    foreach ($paths as $path) {
        if (is_file($path)) {
            require_once $path;
            return;
        }
    }
});
foreach ($files as $file) {
    require_once "$root/$file";
}
